"""Whatever shares a batch, however prompts are cut, cached, preempted or aborted: the tokens are those of a request
alone.

Requests arrive, are aborted and run in random interleavings on a hash model, whose every token depends on every page,
slot and position; the oracle computes each token from scratch.
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from doubles.engines import Driver, check_idle, make_engine, make_inputs
from doubles.hash_model import HashModel, WindowedReference
from doubles.integrity import check_integrity
from doubles.oracle import check_choice, check_logprobs
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.cost_model import CostModel

VOCAB = 96
EOS = frozenset({5})
MODELS = {window: HashModel(VOCAB, window=window) for window in (0, 7, 13)}

token_ids = st.integers(0, VOCAB - 1)
stems = st.sampled_from([[], [1, 2, 3, 4, 5, 6, 7, 8, 9] * 4, [3] * 21, list(range(40)), list(range(17)) + [90] * 9])
built = st.tuples(stems, st.integers(0, 40), st.lists(token_ids, min_size=1, max_size=30)).map(
    lambda t: t[0][: t[1]] + t[2]
)
# Prompts that come again and again, of one token and of whole pages plus one among them.
common = st.sampled_from([[1], [2], [3] * 9, [3] * 17, list(range(33)), list(range(40))])
prompts = st.one_of(common, built)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    """Rules in random combination; most are off most of the time."""

    def sometimes(strategy: st.SearchStrategy[Any], default: Any) -> Any:
        return draw(strategy) if draw(st.integers(0, 3)) == 0 else default

    max_tokens = draw(st.integers(0, 24))
    return SamplingParams(
        n=sometimes(st.integers(2, 4), 1),
        max_tokens=max_tokens,
        seed=draw(st.integers(0, 5)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0])),
        top_k=sometimes(st.integers(1, 20), 0),
        repetition_penalty=sometimes(st.floats(0.5, 2.0), 1.0),
        frequency_penalty=sometimes(st.floats(-2, 2), 0.0),
        presence_penalty=sometimes(st.floats(-2, 2), 0.0),
        logit_bias=sometimes(st.dictionaries(token_ids, st.floats(-5, 5), max_size=4), None),
        allowed_token_ids=sometimes(st.lists(token_ids, min_size=2, max_size=30), None),
        min_tokens=sometimes(st.integers(0, max_tokens), 0),
        stop_token_ids=sometimes(st.lists(token_ids, max_size=6), []),
        ignore_eos=draw(st.booleans()),
        logprobs=sometimes(st.integers(0, 5), None),
        prompt_logprobs=sometimes(st.integers(0, 3), None),
    )


class EngineMachine(RuleBasedStateMachine):
    """Random traffic on one engine."""

    @initialize(
        window=st.sampled_from([0, 0, 7, 13]),
        page_size=st.sampled_from([2, 4, 8]),
        tight=st.booleans(),
        max_sequences=st.integers(1, 6),
        max_rows=st.sampled_from([6, 16, 17, 64]),
        prefix_caching=st.booleans(),
        max_step_ms=st.sampled_from([1e9, 1e9, 6.0, 2.0]),
    )
    def start(
        self,
        window: int,
        page_size: int,
        tight: bool,
        max_sequences: int,
        max_rows: int,
        prefix_caching: bool,
        max_step_ms: float,
    ) -> None:
        self.model = MODELS[window]
        length = 128
        pages = (length // page_size + 2) if tight else 4 * length // page_size
        self.engine = make_engine(
            self.model,
            pages=pages,
            page_size=page_size,
            max_sequences=max_sequences,
            max_rows=max(max_rows, max_sequences),
            max_model_len=length,
            prefix_caching=prefix_caching,
            max_step_ms=max_step_ms,
            costs=CostModel(0.1, 1.0, 0.2),
            eos_ids=EOS,
        )
        self.engine.scheduler.costs.observe = lambda shape, milliseconds: None  # type: ignore[method-assign]
        self.inputs = make_inputs(self.model, max_model_len=length)
        self.driver = Driver(self.engine)
        self.requests: dict[str, Request] = {}
        self.reference = WindowedReference(self.model)

    @rule(
        prompt=prompts,
        params=params(),
        salt=st.sampled_from([None, None, "a", "b"]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def add(self, prompt: list[int], params: SamplingParams, salt: str | None, priority: int) -> None:
        request_id = f"r{len(self.requests)}"
        request = self.inputs.request(prompt, params, request_id=request_id, priority=priority, cache_salt=salt)
        self.requests[request_id] = request
        self.driver.add(request)

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self.driver.step()
                check_integrity(self.engine)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        self.driver.abort(f"r{which % len(self.requests)}")

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(which=st.integers(0, 1000))
    def preempt(self, which: int) -> None:
        running = self.engine.scheduler.running
        self.engine.scheduler._preempt(running[which % len(running)])
        check_integrity(self.engine)

    @rule()
    def forget_prefixes(self) -> None:
        self.engine.cache.clear_prefixes()

    @invariant()
    def memory_is_sound(self) -> None:
        if hasattr(self, "engine"):
            check_integrity(self.engine)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.driver.run()
        assert self.driver.errors == {}
        cache: dict[tuple[int, ...], Any] = {}

        def logits(tokens: list[int]) -> Any:
            key = tuple(tokens)
            if key not in cache:
                cache[key] = self.reference.logits(tokens).numpy()
            return cache[key]

        for request in self.requests.values():
            output = self.driver.output(request.id)
            assert output.finished
            for choice in output.outputs:
                check_choice(request, choice, logits, EOS)
            aborted = any(choice.finish_reason == "abort" for choice in output.outputs)
            if request.params.prompt_logprobs is not None and not aborted:
                assert output.prompt_logprobs is not None
                assert len(output.prompt_logprobs) == len(request.prompt_ids)
                assert output.prompt_logprobs[0] is None
                for at, found in enumerate(output.prompt_logprobs[1:], 1):
                    assert found is not None
                    row = logits(request.prompt_ids[:at])
                    check_logprobs(found, request.prompt_ids[at], row, request.params.prompt_logprobs)
        check_idle(self.engine)
