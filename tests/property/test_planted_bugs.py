"""Every planted bug is caught by a check of the suite, and the unharmed program passes all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

from checks import scheduling, text
from checks.engine_machine import EngineMachine
from checks.planted_bugs import BUGS

pytestmark = pytest.mark.slow

# Found examples are reported as they are: making them small would take most of the time.
QUICK = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


def check_engine() -> None:
    """The engine's properties under random traffic."""
    run_state_machine_as_test(EngineMachine, settings=QUICK)


def check_text() -> None:
    """Pieces of text join to the whole."""
    settings(QUICK, max_examples=200)(given(case=text.cases)(lambda case: text.check_streamed_text(**case)))()


CHECKS: list[Callable[[], None]] = [*scheduling.SCENARIOS, *text.SCENARIOS, check_text, check_engine]


def caught_by() -> str | None:
    """The first check that fails, or None."""
    for check in CHECKS:
        try:
            check()
        except Exception:
            return check.__name__
    return None


def test_unharmed_program_passes() -> None:
    assert caught_by() is None


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    found = caught_by()
    monkeypatch.undo()
    assert found is not None, f"no check noticed the planted bug {name!r}"
