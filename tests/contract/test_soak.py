"""Half a minute of clients of every kind; `make soak` takes longer."""

from __future__ import annotations

import pytest
from soak import check, growth, soak


@pytest.mark.slow
def test_nothing_is_left_after_clients_of_every_kind() -> None:
    found, curve = soak(30)
    check(found)
    assert len(found.actions) == 11  # every kind of visit
    assert {200, 400, 404} <= set(found.statuses)
    # So early, caches still fill; what a minute's leak would be is seen by the long run.
    assert growth(curve, 10) < 20
