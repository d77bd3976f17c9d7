"""One server for the tests that only send requests."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from doubles.contract_model import NAMES, ContractModel, check_nothing_left
from doubles.served import Serving, serving


@pytest.fixture(scope="package")
def server() -> Iterator[Serving]:
    with serving(ContractModel(), served_model_name=NAMES) as running:
        yield running
        check_nothing_left(running)


@pytest.fixture(scope="package")
def http(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
