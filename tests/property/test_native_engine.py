"""The engine over the native step: in bits, what a request gets depends neither on its company nor on how it is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doubles.engines import Driver, check_idle, make_engine, make_inputs
from doubles.native_models import Files
from doubles.native_programs import libraries, why_missing
from doubles.tiny_checkpoints import tiny_model, write_folder, write_gguf
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not libraries(), reason=why_missing())

PAGE, LONGEST = 16, 160
KINDS = {
    "window, int8 cache": ("mistral", {"cache_kind": "int8"}),
    "biases, int4": ("qwen2", {"quantization": "int4"}),
    "experts": ("qwen3_moe", {}),
}
BEGINNINGS = [[(3 * i + begin) % 128 for i in range(40)] for begin in (1, 2)]


@dataclass
class Case:
    """Requests as (beginning and how much of it, own tokens, parameters), and what the engine has to work with."""

    requests: list[tuple[tuple[int, int], list[int], dict[str, Any]]]
    rows: int
    pages: int
    arrivals: list[int]
    aborts: list[int]
    threads: int


params = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 12), "temperature": st.sampled_from([0.0, 0.8]), "seed": st.integers(0, 9)},
    optional={
        "n": st.just(2),
        "prompt_logprobs": st.just(1),
        "top_p": st.just(0.8),
        "repetition_penalty": st.just(1.2),
    },
)
beginnings = st.tuples(st.integers(0, 1), st.integers(0, 40))
requests = st.tuples(beginnings, st.lists(st.integers(0, 127), min_size=1, max_size=30), params)
cases = st.builds(
    Case,
    requests=st.lists(requests, min_size=2, max_size=6),
    rows=st.sampled_from([7, 16, 40]),
    pages=st.integers(12, 40),
    arrivals=st.lists(st.integers(0, 12), min_size=6, max_size=6),
    aborts=st.lists(st.integers(1, 20), max_size=2),
    threads=st.sampled_from([1, 2]),
)


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    family, options = KINDS[request.param]
    model = tiny_model(family, head_dim=32, sliding_window=50 if family == "mistral" else None)
    path = folder / "m"
    if "quantization" in options:
        write_folder(path, model)
    else:
        write_gguf(path := folder / "m.gguf", model, formats="Q4_0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_CACHE_DIR", str(folder / "cache"))
        return Files(path).native(**options)


def request_of(model: Any, case: Case, index: int) -> Request:
    (which, count), own, chosen = case.requests[index]
    values = SamplingParams(logprobs=1, ignore_eos=True, **chosen)
    prompt = BEGINNINGS[which][:count] + own
    return make_inputs(model, max_model_len=LONGEST).request(prompt, values, request_id=str(index))


def result(driver: Driver, index: int) -> Any:
    def exact(entries: Any) -> Any:
        return [each and [(token, lp.logprob, lp.rank) for token, lp in each.items()] for each in entries or []]

    output = driver.output(str(index))
    choices = [(choice.token_ids, choice.finish_reason, exact(choice.logprobs)) for choice in output.outputs]
    return choices, exact(output.prompt_logprobs)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(case=cases)
def test_company_cuts_cache_and_memory_change_no_bit(made: Any, case: Case) -> None:
    model, device = made
    common = {"device": device, "page_size": PAGE, "max_model_len": LONGEST}
    alone = []
    for index in range(len(case.requests)):
        driver = Driver(make_engine(model, **common, pages=40, prefix_caching=False))
        driver.run([request_of(model, case, index)])
        alone.append(result(driver, index))
    with device.running_on(case.threads):
        driver = Driver(make_engine(model, **common, pages=case.pages, max_rows=case.rows, max_sequences=5))
        left = sorted(range(len(case.requests)), key=lambda index: case.arrivals[index])
        noise = make_inputs(model, max_model_len=LONGEST).request(
            BEGINNINGS[0], SamplingParams(max_tokens=60, ignore_eos=True, seed=1), request_id="noise"
        )
        driver.add(noise)
        for step in range(13):
            while left and case.arrivals[left[0]] <= step:
                driver.add(request_of(model, case, left.pop(0)))
            if step in case.aborts:
                driver.abort("noise")
            driver.step()
        driver.run()
    assert driver.errors == {}
    for index, expected in enumerate(alone):
        assert result(driver, index) == expected
    check_idle(driver.engine)
