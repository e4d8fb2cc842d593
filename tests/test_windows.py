"""The windows of a turn, fixed or learnt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.windows import Windows

LOADS = {"small": 2.0, "mid": 15.0, "big": 40.0}


def windows(switch_after: float | None = None, max_turn: float | None = None, max_wait: float = 540) -> Windows:
    return Windows(switch_after, max_turn, max_wait, LOADS.get)


@pytest.mark.parametrize(
    ("turn", "other", "expected"),
    [
        ({"small"}, {"small"}, (4, 60)),
        ({"small", "mid"}, {"small"}, (17, 68)),
        ({"mid"}, {"big"}, (55, 220)),
        ({"unknown"}, {"small"}, (17, 68)),
        (set(), set(), (30, 120)),
        ({"big"}, {"big"}, (80, 270)),
    ],
)
def test_auto_follows_the_loads_of_the_turn_and_of_who_waits(
    turn: set[str], other: set[str], expected: tuple[float, float]
) -> None:
    assert windows().of(turn, other) == expected


def test_numbers_win_over_measurements() -> None:
    assert windows(30, 90).of({"big"}, {"big"}) == (30, 90)
    assert windows(3, None).of({"big"}, {"big"}) == (3, 60)
    assert windows(None, 10).of({"big"}, {"big"}) == (10, 10)


@given(st.floats(allow_nan=False, min_value=-1e9, max_value=1e12), st.floats(min_value=1, max_value=3600))
def test_a_wildly_wrong_measurement_stays_within_the_bounds(load: float, max_wait: float) -> None:
    switch_after, max_turn = Windows(None, None, max_wait, lambda unit: load).of({"a"}, {"b"})
    assert 1 <= switch_after <= 300
    assert switch_after <= max_turn <= max(max_wait / 2, switch_after)
