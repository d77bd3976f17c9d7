"""LLM.generate: the same outputs whether or not the caller looks at tokens as they come."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from doubles.engines import check_idle, make_engine, make_inputs
from doubles.hash_model import HashModel
from slipstream.core.errors import RequestFailedError
from slipstream.core.request import RequestUpdate
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.llm import LLM
from slipstream.sampling.state import SequenceSampler


class Loaded:
    def __init__(self) -> None:
        model = HashModel()
        self.engine = make_engine(model)
        self.inputs = make_inputs(model)


def make_llm() -> LLM:
    return LLM.over(Loaded)  # type: ignore[arg-type]


def test_a_watched_run_gives_what_an_unwatched_one_gives() -> None:
    prompts = [[1, 2, 3], [4] * 30, [5]]
    params = [SamplingParams(temperature=1.0, seed=7, max_tokens=m, n=n) for m, n in ((150, 1), (3, 2), (40, 3))]
    with make_llm() as llm:
        seen: dict[tuple[str, int], list[int]] = {}
        threads = set()

        def watch(update: RequestUpdate) -> None:
            threads.add(threading.current_thread())
            for delta in update.deltas:
                seen.setdefault((update.request.id, delta.index), []).extend(delta.token_ids)

        watched = llm.generate(prompts, params, on_update=watch)
        quiet = llm.generate(prompts, params)
        assert threads == {threading.current_thread()}
        for one, other in zip(watched, quiet, strict=True):
            assert one.finished
            assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
            assert [c.token_ids for c in one.outputs] == [seen[one.request_id, c.index] for c in one.outputs]
    check_idle(llm.loaded.engine)


def test_a_watcher_is_called_at_every_step() -> None:
    with make_llm() as llm:
        updates: list[int] = []
        llm.generate([1, 2], SamplingParams(max_tokens=9), on_update=lambda u: updates.append(len(u.deltas)))
        assert updates == [1] * 9


def test_an_error_comes_before_the_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = SequenceSampler.commit

    def failing(self: SequenceSampler, tokens: Any) -> None:
        if self.params.seed == 666 and self.output_length == 2:
            raise RuntimeError("planted")
        commit(self, tokens)

    monkeypatch.setattr(SequenceSampler, "commit", failing)
    with make_llm() as llm:
        params = [SamplingParams(max_tokens=200, seed=seed) for seed in (1, 666)]
        with pytest.raises(RequestFailedError, match="planted"):
            llm.generate([[1], [2]], params)
        llm.run_in_engine(lambda: None)  # the abort of the other one is taken in before this
        assert not llm.loaded.engine.has_work
    check_idle(llm.loaded.engine)
