"""The engine's promises on the real model, in bits: tokens and log-probabilities do not depend on what shares the
batch, on how prompts are cut, on the cache, on streaming, on aborts beside them, on the number of threads, or on the
processor's instruction set.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.engines import Driver, check_idle, make_engine
from doubles.native_programs import libraries, why_missing
from slipstream.core.config import EngineConfig
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.devices.native_cpu import NativeCpuDevice
from slipstream.engine.build import LoadedEngine, load_engine
from slipstream.engine.core import Engine
from slipstream.loading.weight_source import CheckpointSource
from slipstream.models.registry import build_model

pytestmark = pytest.mark.slow

STORY = "Once upon a time there was a lighthouse keeper who counted the ships that passed in the night. " * 4
PROMPTS = [
    "The capital of France is",
    STORY + "One evening",
    STORY + "At dawn",
    "def fibonacci(n):",
    "Wasser kocht bei 100 Grad. Eis schmilzt bei",
    STORY[:300],
]
PARAMS = [
    {"temperature": 0.0, "max_tokens": 12, "logprobs": 3},
    {"temperature": 0.9, "max_tokens": 14, "seed": 11, "logprobs": 1, "n": 2},
    {"temperature": 0.0, "max_tokens": 10, "prompt_logprobs": 2, "logprobs": 0},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 50, "max_tokens": 9, "seed": 3, "frequency_penalty": 0.5},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.2, "max_tokens": 8, "seed": 5},
    {"temperature": 0.0, "max_tokens": 15, "stop": ["the night", "."]},
]


WAYS: dict[str, dict[str, Any]] = {
    "native": {"numerics": "native"},
    "native, int8 cache": {"numerics": "native", "kv_cache_dtype": "int8"},
    "float32": {"numerics": "reference", "dtype": "float32"},
    "bfloat16": {"numerics": "reference", "dtype": "bfloat16"},
}


@pytest.fixture(scope="module", params=WAYS)
def loaded(request: pytest.FixtureRequest, default_model_path: Path) -> Iterator[LoadedEngine]:
    settings = WAYS[request.param]
    if settings["numerics"] == "native" and not libraries():
        pytest.skip(why_missing())
    threads = torch.get_num_threads()
    yield load_engine(EngineConfig(model=str(default_model_path), max_model_len=512, cache_memory=2**29, **settings))
    torch.set_num_threads(threads)


def engine_for(loaded: LoadedEngine, **settings: Any) -> Engine:
    return make_engine(
        loaded.model,
        device=loaded.device,
        **{"pages": 120, "page_size": 32, "max_model_len": 512, "max_rows": 512, **settings},
        eos_ids=loaded.engine.eos_ids,
        tokenizer=loaded.inputs.tokenizer,
    )


def request_of(loaded: LoadedEngine, index: int) -> Request:
    return loaded.inputs.request(PROMPTS[index], SamplingParams(**PARAMS[index]), request_id=str(index))


def result(driver: Driver, index: int) -> Any:
    """Everything a caller sees of a request, log-probabilities as exact floats."""
    output = driver.output(str(index))
    choices = []
    for choice in output.outputs:
        logprobs = [[(t, lp.logprob, lp.rank) for t, lp in entry.items()] for entry in choice.logprobs or []]
        choices.append((choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason, logprobs))
        assert driver.streamed[(str(index), choice.index)] == choice.text
    prompt = [entry and [(t, lp.logprob) for t, lp in entry.items()] for entry in output.prompt_logprobs or []]
    return choices, prompt


@pytest.fixture(scope="module")
def alone(loaded: LoadedEngine) -> list[Any]:
    """Each request by itself, prompt in one piece, nothing cached."""
    results = []
    for index in range(len(PROMPTS)):
        driver = Driver(engine_for(loaded, prefix_caching=False))
        driver.run([request_of(loaded, index)])
        results.append(result(driver, index))
    return results


def check_all(driver: Driver, alone: list[Any]) -> None:
    assert driver.errors == {}
    for index, expected in enumerate(alone):
        assert result(driver, index) == expected, f"request {index} differs"
    check_idle(driver.engine)


def test_batched(loaded: LoadedEngine, alone: list[Any]) -> None:
    driver = Driver(engine_for(loaded))
    driver.run([request_of(loaded, index) for index in range(len(PROMPTS))])
    check_all(driver, alone)


@pytest.mark.parametrize("rows", [9, 23, 64])
def test_chunked_in_a_crowd_that_comes_and_goes(loaded: LoadedEngine, alone: list[Any], rows: int) -> None:
    chance = random.Random(rows)
    driver = Driver(engine_for(loaded, max_rows=rows, max_sequences=6))
    waiting = [request_of(loaded, index) for index in range(len(PROMPTS))]
    chance.shuffle(waiting)
    noise = 0

    def between() -> None:
        nonlocal noise
        if waiting and chance.random() < 0.5:
            driver.add(waiting.pop())
        if noise < 6 and chance.random() < 0.3:
            other = loaded.inputs.request(
                STORY[: chance.randrange(20, 200)], SamplingParams(max_tokens=30), request_id=f"noise{noise}"
            )
            driver.add(other)
            noise += 1
        if noise and chance.random() < 0.2:
            driver.abort(f"noise{chance.randrange(noise)}")

    driver.add(waiting.pop())
    driver.run(between=between)
    driver.run(waiting)
    check_all(driver, alone)


def test_cached(loaded: LoadedEngine, alone: list[Any]) -> None:
    driver = Driver(engine_for(loaded))
    for _ in range(2):
        driver.streamed.clear()
        driver.run([request_of(loaded, index) for index in range(len(PROMPTS))])
    assert driver.output("1").num_cached_tokens >= 64
    check_all(driver, alone)


def test_preempted(loaded: LoadedEngine, alone: list[Any]) -> None:
    driver = Driver(engine_for(loaded))

    def take_pages() -> None:
        running = driver.engine.scheduler.running
        if driver.steps % 6 == 5 and running:
            driver.engine.scheduler._preempt(running[-1])

    driver.run([request_of(loaded, index) for index in range(len(PROMPTS))], between=take_pages)
    assert driver.engine.stats.preemptions >= 2
    check_all(driver, alone)


def test_one_thread_equals_all(loaded: LoadedEngine, alone: list[Any]) -> None:
    for count in (1, 2):
        with loaded.device.running_on(count):
            driver = Driver(engine_for(loaded))
            driver.run([request_of(loaded, index) for index in range(len(PROMPTS))])
        check_all(driver, alone)


def test_every_instruction_set_gives_the_same(loaded: LoadedEngine, alone: list[Any]) -> None:
    device = loaded.device
    if not isinstance(device, NativeCpuDevice):
        pytest.skip("the PyTorch path has torch's own instruction sets")
    for library in libraries():
        model = build_model(loaded.checkpoint.config)
        source = CheckpointSource(loaded.checkpoint, model)
        lowered = NativeCpuDevice(library, model, model.cache_specs(), source, options=device.options)
        driver = Driver(engine_for(replace(loaded, model=model, device=lowered)))
        driver.run([request_of(loaded, index) for index in range(len(PROMPTS))])
        check_all(driver, alone)
