"""A pool that cannot hold a request ends in an error, never in a loop."""

from __future__ import annotations

import pytest

from doubles.engines import Driver, make_engine, make_inputs
from doubles.hash_model import HashModel
from slipstream.core.sampling_params import SamplingParams


def test_a_pool_that_is_too_small_is_an_error() -> None:
    model = HashModel()
    engine = make_engine(model, pages=4, page_size=4, max_model_len=100)
    driver = Driver(engine)
    driver.add(make_inputs(model).request([1] * 30, SamplingParams(max_tokens=5), request_id="r"))
    with pytest.raises(RuntimeError, match="page pool is too small"):
        driver.run()
