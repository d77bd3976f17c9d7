"""Who is served when: fair progress, priorities, bounded steps, salts kept apart, draws that differ."""

from __future__ import annotations

from typing import Any

from doubles.engines import Driver, check_idle, make_engine, make_inputs
from doubles.hash_model import HashModel, WindowedReference
from doubles.oracle import check_choice
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.cost_model import CostModel

MODEL = HashModel()


def _greedy(max_tokens: int, **rest: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **rest)


def check_fair_progress() -> None:
    """A long prompt ends in time while short ones keep coming, and the short ones do not wait for it."""
    engine = make_engine(MODEL, pages=2000, max_model_len=4000, max_step_ms=4.5, costs=CostModel(0, 1, 0.01))
    inputs, driver = make_inputs(MODEL, max_model_len=4000), Driver(engine)
    driver.add(inputs.request([7] * 1600, _greedy(1), request_id="long"))
    waited: dict[str, int] = {}
    done_at = None
    for step in range(400):
        if step % 2 == 0:
            name = f"short{step}"
            waited[name] = step
            driver.add(inputs.request([step % 90, 3, 4, 5] * 6, _greedy(4), request_id=name))
        driver.step()
        if done_at is None and driver.output("long").finished:
            done_at = step
        for name, start in list(waited.items()):
            if driver.output(name).outputs[0].token_ids:
                assert step - start <= 12, f"a short prompt waited {step - start} steps"
                del waited[name]
    assert done_at is not None, "the long prompt starved"
    assert done_at <= 120, f"the long prompt took {done_at} steps"
    driver.run()
    check_idle(engine)


def check_no_starvation() -> None:
    """A long prompt ends in time even while short ones alone could fill every step."""
    engine = make_engine(MODEL, pages=2000, max_model_len=4000, max_step_ms=4.5, costs=CostModel(0, 1, 0.01))
    engine.scheduler.costs.observe = lambda shape, milliseconds: None  # type: ignore[method-assign]
    inputs, driver = make_inputs(MODEL, max_model_len=4000), Driver(engine)
    driver.add(inputs.request([7] * 1600, _greedy(1), request_id="long"))
    driver.add(inputs.request([1], _greedy(150), request_id="stream"))
    for step in range(120):
        for other in range(6):
            prompt = [step % 90, other, 4, 5] * 6
            driver.add(inputs.request(prompt, _greedy(1), request_id=f"{step}.{other}"))
        driver.step()
    assert driver.output("long").finished, "the long prompt starved"
    driver.run()
    check_idle(engine)


def check_preemption() -> None:
    """Sequences that lose their pages again and again go on with the tokens, penalties and noise they had."""
    for window in (0, 9):
        _check_preempted(HashModel(window=window))


def _check_preempted(model: HashModel) -> None:
    engine = make_engine(model, pages=30, max_model_len=100, eos_ids={5})
    inputs, driver = make_inputs(model, max_model_len=100), Driver(engine)
    rules: list[dict[str, Any]] = [
        {"temperature": 0.0, "frequency_penalty": 1.5},
        {"temperature": 0.0, "presence_penalty": 2.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 4, "n": 2},
        {"temperature": 0.8, "frequency_penalty": 0.7, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.0, "min_tokens": 30},
    ]
    requests = [
        inputs.request([index * 7, 3] * 10, SamplingParams(max_tokens=50, **rule), request_id=str(index))
        for index, rule in enumerate(rules)
    ]

    def take_pages() -> None:
        running = engine.scheduler.running
        if driver.steps % 5 == 4 and running:
            engine.scheduler._preempt(running[driver.steps % len(running)])

    driver.run(requests, between=take_pages)
    assert engine.stats.preemptions >= 10
    assert driver.errors == {}
    reference = WindowedReference(model)
    for request in requests:
        for choice in driver.output(request.id).outputs:
            check_choice(request, choice, lambda tokens: reference.logits(tokens).numpy(), frozenset({5}))
    check_idle(engine)


def check_abandoned_prefixes() -> None:
    """What a request leaves behind that was aborted in the middle of its prompt is sound for the next one."""
    prompt = list(range(40))
    logits = WindowedReference(MODEL).logits
    for steps in range(1, 8):
        engine = make_engine(MODEL, max_rows=6, max_sequences=2)
        inputs, driver = make_inputs(MODEL), Driver(engine)
        driver.add(inputs.request(prompt, _greedy(9), request_id="first"))
        for _ in range(steps):
            driver.step()
        driver.abort("first")
        second = inputs.request([*prompt, 50], _greedy(9), request_id="second")
        driver.run([second])
        check_choice(second, driver.output("second").outputs[0], lambda tokens: logits(tokens).numpy())
        assert driver.output("second").num_cached_tokens >= 6 * steps - 9
        check_idle(engine)


def check_priorities() -> None:
    """An urgent request is served before others that came first, also when it takes their place."""
    engine = make_engine(MODEL, max_sequences=1)
    inputs, driver = make_inputs(MODEL), Driver(engine)
    order: list[str] = []
    for name, priority in (("running", 1), ("waiting", 1), ("urgent", 0)):
        driver.add(inputs.request([1, 2, 3], _greedy(6), request_id=name, priority=priority))
        driver.step()
    while engine.has_work:
        driver.step()
        order += [n for n in driver.collectors if driver.output(n).finished and n not in order]
    assert order == ["urgent", "running", "waiting"]
    logits = WindowedReference(MODEL).logits
    for name in order:
        check_choice(driver.collectors[name].request, driver.output(name).outputs[0], lambda t: logits(t).numpy())
    check_idle(engine)


def check_step_time() -> None:
    """While someone waits for a next token, a step is planned to take no longer than asked."""
    costs = CostModel(0.5, 1, 0.02)
    engine = make_engine(MODEL, pages=1500, max_model_len=4000, max_step_ms=6.0, max_rows=512, costs=costs)
    inputs, driver = make_inputs(MODEL, max_model_len=4000), Driver(engine)
    schedule = engine.scheduler.schedule
    shapes = []

    def watched() -> Any:
        plan = schedule()
        decoding = any(work.rows == 1 for work in plan)
        prompt_rows = sum(work.rows for work in plan if work.rows > 1)
        shapes.append((decoding, prompt_rows, engine.scheduler.costs.predict(engine.scheduler.shape_of(plan))))
        return plan

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    engine.scheduler.costs.observe = lambda shape, milliseconds: None  # type: ignore[method-assign]
    driver.add(inputs.request([1], _greedy(100), request_id="stream"))
    driver.step()
    driver.run([inputs.request([9] * 3000, _greedy(1), request_id="long")])
    mixed = [(rows, predicted) for decoding, rows, predicted in shapes if decoding and rows]
    assert len(mixed) > 20
    assert all(predicted <= 6.0 for rows, predicted in mixed if rows > 4)
    assert max(rows for rows, _ in mixed) >= 48, "the time allowed is not used"


def check_salts_apart() -> None:
    """The same prompt is found again under its salt and under no other."""
    engine = make_engine(MODEL)
    inputs, driver = make_inputs(MODEL), Driver(engine)
    found = []
    for index, salt in enumerate(("a", "b", "a", None, None, "b")):
        name = str(index)
        driver.run([inputs.request([4] * 30, _greedy(1), request_id=name, cache_salt=salt)])
        found.append(driver.output(name).num_cached_tokens)
    assert found == [0, 0, 28, 0, 28, 28]
    check_idle(engine)


def check_draws_differ() -> None:
    """With equal logits the noise alone decides: it differs by position, choice and seed, and by nothing else."""
    flat = HashModel(sharpness=0.0)
    inputs = make_inputs(flat)

    def draw(seed: int, *, crowd: int = 0, max_rows: int = 64) -> list[list[int]]:
        driver = Driver(make_engine(flat, max_rows=max_rows))
        params = SamplingParams(n=3, max_tokens=40, seed=seed)
        others = [inputs.request([i], SamplingParams(max_tokens=30), request_id=str(i)) for i in range(crowd)]
        driver.run([*others, inputs.request([1, 2, 3], params, request_id="r")])
        return driver.tokens("r")

    first = draw(1)
    assert all(len(set(tokens)) > 20 for tokens in first), "draws repeat along the answer"
    assert len({tuple(tokens) for tokens in first}) == 3, "choices of one request are alike"
    assert all(a != b for a in first for b in draw(2)), "two seeds give the same draws"
    assert first == draw(1, crowd=5) == draw(1, max_rows=8), "draws depend on what else runs"


def check_oldest_is_dropped() -> None:
    """When pages run out, those that were used longest ago go first."""
    engine = make_engine(MODEL, pages=40, max_model_len=60)
    inputs, driver = make_inputs(MODEL, max_model_len=60), Driver(engine)

    def ask(first: int) -> int:
        name = f"{first}.{driver.steps}"
        driver.run([inputs.request([first, *range(40)], _greedy(1), request_id=name)])
        return driver.output(name).num_cached_tokens

    for prompt in (1, 2, 3):
        assert ask(prompt) == 0
    assert ask(1) == 40  # used again, so 2 is the oldest now
    assert ask(4) == 0
    assert ask(1) == 40
    assert ask(2) < 40
    check_idle(engine)


SCENARIOS = [
    check_oldest_is_dropped,
    check_fair_progress,
    check_no_starvation,
    check_preemption,
    check_abandoned_prefixes,
    check_priorities,
    check_step_time,
    check_salts_apart,
    check_draws_differ,
]
