"""Fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.core.config import env_value
from slipstream.loading import catalog


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file, downloaded on first use. SLIPSTREAM_OFFLINE_TESTS=1 skips the tests that need it."""
    if env_value("offline_tests") == "1":
        pytest.skip("SLIPSTREAM_OFFLINE_TESTS=1: tests that need the downloaded model are left out")
    return catalog.resolve(None, fetch_missing=True)
