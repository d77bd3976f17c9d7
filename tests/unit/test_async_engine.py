"""The asyncio front: outputs so far, many at once, leaving early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from doubles.engines import Driver, check_idle, make_engine, make_inputs
from doubles.hash_model import HashModel
from slipstream.core.errors import InvalidRequestError
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.async_engine import AsyncEngine

MODEL = HashModel()


def with_engine(body: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    core = make_engine(MODEL, pages=500)
    loaded: Any = SimpleNamespace(engine=core, inputs=make_inputs(MODEL), report={})
    engine = AsyncEngine.over(lambda: loaded, max_queue=100)

    async def bounded() -> None:
        await asyncio.wait_for(asyncio.ensure_future(body(engine)), timeout=30)

    try:
        asyncio.run(bounded())
    finally:
        engine.shutdown()
    check_idle(core)


def alone(prompt: list[int], params: SamplingParams) -> list[list[int]]:
    driver = Driver(make_engine(MODEL))
    driver.run([make_inputs(MODEL).request(prompt, params, request_id="r")])
    return driver.tokens("r")


def test_outputs_grow_to_the_whole() -> None:
    params = SamplingParams(max_tokens=12, seed=3, n=2)

    async def body(engine: AsyncEngine) -> None:
        outputs = [output async for output in engine.generate([1, 2, 3], params)]
        lengths = [[len(choice.token_ids) for choice in output.outputs] for output in outputs]
        assert lengths == sorted(lengths)
        assert all(not output.finished for output in outputs[:-1])
        assert outputs[-1].finished
        assert [choice.token_ids for choice in outputs[-1].outputs] == alone([1, 2, 3], params)
        for output in outputs:
            for choice, last in zip(output.outputs, outputs[-1].outputs, strict=True):
                assert choice.token_ids == last.token_ids[: len(choice.token_ids)]

    with_engine(body)


def test_many_at_once_are_each_as_alone() -> None:
    async def one(engine: AsyncEngine, index: int) -> None:
        params = SamplingParams(max_tokens=5 + index % 7, seed=index)
        last = None
        async for output in engine.generate([index, 2, 3], params):
            last = output
        assert last is not None
        assert [choice.token_ids for choice in last.outputs] == alone([index, 2, 3], params)

    async def body(engine: AsyncEngine) -> None:
        await asyncio.gather(*(one(engine, index) for index in range(40)))

    with_engine(body)


@pytest.mark.parametrize("how", ["aclose", "cancel", "break"])
def test_leaving_early_aborts(how: str) -> None:
    async def body(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        if how == "cancel":

            async def consume() -> None:
                async for _ in engine.generate([1], params):
                    pass

            task = asyncio.create_task(consume())
            await asyncio.sleep(0.02)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = engine.generate([1], params)
            async for _ in stream:
                break
            await stream.aclose()
        for _ in range(500):
            if not engine.worker.engine.has_work:
                break
            await asyncio.sleep(0.01)
        assert not engine.worker.engine.has_work
        assert engine.worker.engine.stats.output_tokens < 200

    with_engine(body)


def test_abort_by_id_ends_the_iterator() -> None:
    async def body(engine: AsyncEngine) -> None:
        reasons: list[str | None] = []
        async for output in engine.generate([1], SamplingParams(max_tokens=240, ignore_eos=True), request_id="it"):
            reasons = [choice.finish_reason for choice in output.outputs]
            await engine.abort("it")
        assert reasons == ["abort"]

    with_engine(body)


def test_bad_input_raises_before_anything_runs() -> None:
    async def body(engine: AsyncEngine) -> None:
        with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
            async for _ in engine.generate([1000]):
                pass
        assert engine.worker.engine.stats.steps == 0

    with_engine(body)


def test_an_abort_while_the_prompt_is_tokenized_counts() -> None:
    async def body(engine: AsyncEngine) -> None:
        async def consume() -> list[str | None]:
            last: list[str | None] = []
            async for output in engine.generate([1], SamplingParams(max_tokens=200, n=2), request_id="it"):
                last = [choice.finish_reason for choice in output.outputs]
            return last

        task = asyncio.create_task(consume())
        await asyncio.sleep(0)
        await engine.abort("it")
        assert await task == ["abort", "abort"]

    with_engine(body)


def test_an_id_may_be_used_again_at_once() -> None:
    async def body(engine: AsyncEngine) -> None:
        for _ in range(20):
            stream = engine.generate([1], SamplingParams(max_tokens=200, ignore_eos=True), request_id="x")
            async for _ in stream:
                break
            await stream.aclose()
            last = None
            async for output in engine.generate([2], SamplingParams(max_tokens=5, seed=1), request_id="x"):
                last = output
            assert last is not None
            assert [choice.token_ids for choice in last.outputs] == alone([2], SamplingParams(max_tokens=5, seed=1))

    with_engine(body)
