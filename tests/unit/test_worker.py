"""The engine's thread: bad requests, failing steps, aborts at every stage, a full queue, stopping."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from doubles.engines import check_idle, make_engine, make_inputs
from doubles.hash_model import HashModel
from slipstream.core.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    SlipstreamError,
)
from slipstream.core.request import Request, RequestUpdate
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.worker import EngineWorker
from slipstream.sampling.state import SequenceSampler

WAIT = 20.0


class GatedModel(HashModel):
    """A hash model whose forward passes wait for a permit each, and which can be told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.failure: Exception | None = None
        self.open = True

    def forward(self, rows: Any, caches: Any) -> Any:
        if not self.open:
            self.entered.release()
            assert self.permits.acquire(timeout=WAIT)
        if self.failure is not None:
            error, self.failure = self.failure, None
            raise error
        return super().forward(rows, caches)


class Client:
    """Submits requests and waits for their ends."""

    def __init__(self, model: HashModel, **settings: Any) -> None:
        max_queue = settings.pop("max_queue", 1024)
        self.model = model
        self.engine = make_engine(model, **settings)
        self.inputs = make_inputs(model)
        self.worker = EngineWorker(lambda: self.engine, max_queue=max_queue)
        self.updates: dict[str, queue.SimpleQueue[RequestUpdate]] = {}
        self.received: dict[str, list[int]] = {}
        """Tokens in each update."""
        self.sink = self._sink

    def _sink(self, updates: Any) -> None:
        for update in updates:
            tokens = sum(len(delta.token_ids) for delta in update.deltas)
            self.received.setdefault(update.request.id, []).append(tokens)
            self.updates[update.request.id].put(update)

    def submit(self, name: str, prompt: list[int], **params: Any) -> Request:
        request = self.inputs.request(prompt, SamplingParams(**{"temperature": 0, **params}), request_id=name)
        self.updates[name] = queue.SimpleQueue()
        self.worker.submit(request, self.sink)
        return request

    def end(self, name: str) -> RequestUpdate:
        """Wait for the last update of a request."""
        while True:
            update = self.updates[name].get(timeout=WAIT)
            if update.finished:
                return update

    def idle(self) -> None:
        self.worker.stop()
        assert not self.worker.alive
        check_idle(self.engine)


@pytest.fixture
def gated() -> Iterator[tuple[Client, GatedModel]]:
    model = GatedModel()
    client = Client(model)
    yield client, model
    model.open = True
    model.permits.release(1000)
    client.worker.stop()


def finish(update: RequestUpdate) -> list[str | None]:
    return [delta.finish_reason for delta in update.deltas]


def test_a_request_that_fails_in_the_engine_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = SequenceSampler.commit

    def failing(self: SequenceSampler, tokens: Any) -> None:
        if self.params.seed == 666 and self.output_length == 2:
            raise RuntimeError("planted")
        commit(self, tokens)

    monkeypatch.setattr(SequenceSampler, "commit", failing)
    client = Client(HashModel())
    client.submit("bad", [1, 2, 3], max_tokens=9, seed=666, n=2)
    client.submit("good", [1, 2, 3], max_tokens=9)
    error = client.end("bad").error
    assert isinstance(error, RequestFailedError)
    assert "planted" in error.message
    assert client.end("good").error is None
    client.idle()


def test_a_request_that_cannot_be_added_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: SequenceSampler, *args: Any, **kwargs: Any) -> None:
        raise ValueError("planted")

    client = Client(HashModel())
    with monkeypatch.context() as patch:
        patch.setattr(SequenceSampler, "__init__", failing)
        client.submit("bad", [1])
        assert isinstance(client.end("bad").error, RequestFailedError)
    client.submit("good", [1], max_tokens=2)
    assert client.end("good").error is None
    client.idle()


def test_a_dead_step_reaches_everyone_in_it_and_the_engine_goes_on(gated: tuple[Client, GatedModel]) -> None:
    client, model = gated
    model.open = False
    for name in ("a", "b", "c"):
        client.submit(name, [1, 2, 3], max_tokens=5, n=2)
    assert model.entered.acquire(timeout=WAIT)
    model.failure = RuntimeError("the chip is gone")
    model.open = True
    model.permits.release()
    first = client.end("a").error
    assert isinstance(first, EngineDeadError)
    assert "the chip is gone" in first.message
    # The others were in the same step or came after it; none is left waiting.
    for name in ("b", "c"):
        client.end(name)
    client.submit("next", [1, 2, 3], max_tokens=5)
    assert client.end("next").error is None
    assert client.engine.stats.failed_steps == 1
    client.idle()


def test_a_failure_outside_of_the_model_fails_all_and_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GatedModel()
    client = Client(model)
    model.open = False
    client.submit("running", [1, 2, 3], max_tokens=50)
    assert model.entered.acquire(timeout=WAIT)
    client.submit("queued", [1, 2, 3], max_tokens=50)
    with monkeypatch.context() as patch:

        def failing(self: Scheduler) -> Any:
            raise KeyError("planted")

        patch.setattr(Scheduler, "schedule", failing)
        model.open = True
        model.permits.release()
        for name in ("running", "queued"):
            assert isinstance(client.end(name).error, EngineDeadError)
    client.submit("next", [1, 2, 3], max_tokens=5)
    assert client.end("next").error is None
    client.idle()


def test_what_a_step_did_comes_before_a_failure_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(HashModel())
    schedule, calls = Scheduler.schedule, [0]

    def failing(self: Scheduler) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyError("planted")
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", failing)
    client.submit("it", [1, 2, 3], max_tokens=50)
    assert isinstance(client.end("it").error, EngineDeadError)
    assert client.received["it"] == [1, 1, 1, 0]
    client.idle()


def test_what_a_step_did_comes_before_the_abort(gated: tuple[Client, GatedModel]) -> None:
    client, model = gated
    model.open = False
    client.submit("it", [1, 2, 3], max_tokens=50)
    for _ in range(3):
        assert model.entered.acquire(timeout=WAIT)
        model.permits.release()
    assert model.entered.acquire(timeout=WAIT)
    client.worker.abort("it")
    model.permits.release()
    assert finish(client.end("it")) == ["abort"]
    assert client.received["it"] == [1, 1, 1, 1, 0]
    client.idle()


def test_a_step_is_handed_over_before_the_next_one_runs(gated: tuple[Client, GatedModel]) -> None:
    client, model = gated
    model.open = False
    client.submit("it", [1, 2, 3], max_tokens=50)
    for step in range(5):
        assert model.entered.acquire(timeout=WAIT)
        assert client.received.get("it", []) == [1] * step
        model.permits.release()


@pytest.mark.parametrize("stage", ["queued", "prefill", "decode", "choices"])
def test_abort_takes_effect_within_one_step(gated: tuple[Client, GatedModel], stage: str) -> None:
    client, model = gated
    client.engine.scheduler.max_rows = 16
    client.engine.scheduler.max_sequences = 4
    model.open = False
    prompt, params, steps = {
        "queued": ([1, 2, 3], {}, 1),
        "prefill": ([5] * 60, {}, 2),
        "decode": ([1, 2, 3], {}, 3),
        "choices": ([1, 2, 3], {"n": 3}, 3),
    }[stage]
    if stage == "queued":
        client.submit("other", [9] * 60, max_tokens=30)
        assert model.entered.acquire(timeout=WAIT)
        client.submit("it", prompt, max_tokens=50)
    else:
        client.submit("it", prompt, max_tokens=50, **params)
        for _ in range(steps):
            assert model.entered.acquire(timeout=WAIT)
            model.permits.release()
        assert model.entered.acquire(timeout=WAIT)
    # The engine is inside a step now. The abort must be served before the next one begins.
    client.worker.abort("it")
    model.permits.release()
    update = client.end("it")
    assert update.error is None
    assert finish(update)
    assert set(finish(update)) == {"abort"}
    model.open = True
    model.permits.release(1000)
    if stage == "queued":
        assert client.end("other").error is None
    client.idle()


def test_unknown_and_repeated_aborts_are_ignored() -> None:
    client = Client(HashModel())
    client.worker.abort("nobody")
    client.submit("it", [1], max_tokens=3)
    client.end("it")
    client.worker.abort("it")
    client.worker.abort("it")
    client.submit("next", [1], max_tokens=3)
    assert client.end("next").error is None
    client.idle()


def test_an_id_in_use_is_refused_and_the_first_request_goes_on(gated: tuple[Client, GatedModel]) -> None:
    client, model = gated
    model.open = False
    request = client.submit("it", [1, 2], max_tokens=4)
    assert model.entered.acquire(timeout=WAIT)
    seen: queue.SimpleQueue[RequestUpdate] = queue.SimpleQueue()
    client.worker.submit(request, lambda updates: [seen.put(update) for update in updates] and None)
    model.open = True
    model.permits.release()
    error = seen.get(timeout=WAIT).error
    assert error is not None
    assert error.param == "request_id"
    assert client.end("it").error is None
    client.idle()


def test_a_receiver_that_raises_hurts_nobody() -> None:
    client = Client(HashModel())

    def bad(updates: Any) -> None:
        raise RuntimeError("planted")

    client.worker.submit(client.inputs.request([1, 2], SamplingParams(max_tokens=5), request_id="bad"), bad)
    client.submit("good", [1, 2], max_tokens=9)
    assert client.end("good").error is None
    client.idle()


def test_a_full_queue_is_refused_with_503(gated: tuple[Client, GatedModel]) -> None:
    client, model = gated
    client.worker.max_queue = 2
    model.open = False
    client.submit("a", [1], max_tokens=2)
    client.submit("b", [1], max_tokens=2)
    with pytest.raises(OverloadedError) as caught:
        client.submit("c", [1], max_tokens=2)
    assert caught.value.status == 503
    model.open = True
    model.permits.release(1000)
    assert client.end("a").error is None
    assert client.end("b").error is None
    client.submit("d", [1], max_tokens=2)
    assert client.end("d").error is None
    client.idle()


def test_stopping_ends_open_requests_with_an_error(gated: tuple[Client, GatedModel]) -> None:
    client, model = gated
    model.open = False
    client.submit("it", [1], max_tokens=200)
    assert model.entered.acquire(timeout=WAIT)
    client.worker.stop(timeout=0.01)
    model.open = True
    model.permits.release()
    assert isinstance(client.end("it").error, EngineDeadError)
    client.idle()
    with pytest.raises(SlipstreamError):
        client.submit("late", [1])


def test_logits_that_are_not_numbers_fail_their_request_only() -> None:
    class Sick(HashModel):
        def logits(self, hidden: Any) -> Any:
            logits = super().logits(hidden)
            logits[: min(1, len(logits))] = float("nan")
            return logits

    client = Client(Sick(), max_sequences=2)
    client.submit("sick", [1, 2, 3], max_tokens=5)
    error = client.end("sick").error
    assert isinstance(error, RequestFailedError)
    assert "no token could be chosen" in error.message
    client.idle()


def test_excluding_every_token_fails_that_request_only() -> None:
    client = Client(HashModel(), eos_ids={3})
    client.submit("it", [1, 2, 3], max_tokens=5, min_tokens=2, allowed_token_ids=[3])
    client.submit("other", [1, 2, 3], max_tokens=5)
    error = client.end("it").error
    assert isinstance(error, InvalidRequestError)
    assert error.param == "allowed_token_ids"
    assert "min_tokens" in error.message
    assert client.end("other").error is None
    client.idle()


def test_what_building_raises_reaches_the_caller() -> None:
    def build() -> Any:
        raise ConfigError("planted", param="threads")

    with pytest.raises(ConfigError, match="planted"):
        EngineWorker(build)


def test_calls_run_in_the_engine_thread_between_steps(gated: tuple[Client, GatedModel]) -> None:
    client, _ = gated
    client.submit("it", [1, 2], max_tokens=30)
    assert client.worker.call(lambda: threading.current_thread().name) == "slipstream-engine"
    with pytest.raises(ZeroDivisionError):
        client.worker.call(lambda: 1 // 0)
    assert client.end("it").error is None
    client.idle()
    with pytest.raises(EngineDeadError):
        client.worker.call(lambda: 1)


def test_ids_that_are_not_strings_hurt_nobody() -> None:
    client = Client(HashModel())
    client.worker.abort(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="request_id"):
        client.inputs.request([1], request_id=7)  # type: ignore[arg-type]
    client.submit("good", [1, 2], max_tokens=3)
    assert client.end("good").error is None
    client.idle()


def test_a_taken_id_with_a_receiver_that_raises_hurts_nobody(gated: tuple[Client, GatedModel]) -> None:
    client, model = gated
    model.open = False
    request = client.submit("it", [1, 2], max_tokens=4)
    assert model.entered.acquire(timeout=WAIT)

    def bad(updates: Any) -> None:
        raise RuntimeError("planted")

    client.worker.submit(request, bad)
    model.open = True
    model.permits.release()
    assert client.end("it").error is None
    client.idle()


def test_a_cached_prompt_of_whole_pages_and_one_token_is_served() -> None:
    client = Client(HashModel())
    for name in ("first", "again", "more"):
        client.submit(name, [7] * 33, max_tokens=3, n=3)
        assert client.end(name).error is None
    client.idle()
