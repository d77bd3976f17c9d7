"""The checks of the engine under hypothesis."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from checks import scheduling, text
from checks.engine_machine import EngineMachine

EngineMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.slow
def test_engine_machine_for_thousands_of_steps() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    long = settings(EngineMachine.TestCase.settings, max_examples=600, stateful_step_count=80)
    run_state_machine_as_test(EngineMachine, settings=long)


@settings(max_examples=400, deadline=None)
@given(case=text.cases)
def test_streamed_text_is_the_whole_text(case: dict[str, Any]) -> None:
    text.check_streamed_text(**case)


@pytest.mark.parametrize("check", [*scheduling.SCENARIOS, *text.SCENARIOS], ids=lambda check: check.__name__)
def test_check(check: Any) -> None:
    check()
