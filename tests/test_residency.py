"""R: what a grant, an end, a failure and a report make of it."""

from __future__ import annotations

from collections import Counter

import pytest

from proxy.residency import Residency, subtract
from proxy.router import ClassRouter, Router, evict_all
from rwlock_reference import TableRouter, sets


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def some(names: str) -> frozenset[str]:
    return frozenset(names)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def residency(clock: Clock) -> Residency:
    """Any two of a, b, x fit."""
    return Residency(sets("xb", "ab", "ax"), clock)


def loaded(residency: Residency, names: str) -> Residency:
    """Each of `names` loaded and in use."""
    for name in names:
        cold, _ = residency.enter(some(name))
        residency.answered(some(name))
        residency.settle(moved=cold)
    return residency


def test_a_grant_takes_out_what_it_stops_and_puts_in_its_own(residency: Residency) -> None:
    assert residency.enter(some("a")) == (True, some(""))
    assert residency.enter(some("x")) == (True, some(""))
    assert residency.resident == some("ax")
    assert residency.enter(some("b")) == (True, some("a"))
    assert residency.resident == some("xb")
    assert residency.in_use == Counter("axb")


def test_a_grant_of_what_is_resident_needs_no_load(residency: Residency) -> None:
    loaded(residency, "a")
    assert residency.holds(some("a"))
    assert not residency.holds(some("ab"))
    assert residency.enter(some("a")) == (False, some(""))
    assert residency.in_use == Counter("aa")


def test_several_units_are_asked_against_the_same_r_and_stop_none_of_their_own() -> None:
    router = TableRouter({"a": some("bc"), "b": some("ad")})
    assert evict_all(router, some("ab"), some("abcde")) == some("cd")
    assert evict_all(ClassRouter(), some("ab"), some("abc")) == some("c")
    assert evict_all(TableRouter({}), some("ab"), some("abc")) == some("")


def test_a_turn_is_asked_as_if_its_models_were_resident(residency: Residency) -> None:
    loaded(residency, "a")
    assert residency.evicts(some("b")) == some("")
    assert residency.spares(some("b"), some("a"))
    assert not residency.spares(some("b"), some("ax")), "with x there, b stops a"


def test_a_turn_is_asked_as_if_the_newcomer_were_not_resident(clock: Clock) -> None:
    residency = Residency(sets("a", "b"), clock)
    residency.resident = some("b")
    assert residency.evicts(some("b")) == some("")
    assert not residency.spares(some("b"), some("a"))
    assert residency.spares(some("b"), some("b"))


def test_nobody_joins_who_stops_a_unit_in_use(residency: Residency) -> None:
    loaded(residency, "ax")
    assert not residency.may_join(some("b"))
    residency.leave(some("a"), loading=False, failed=False)
    assert residency.may_join(some("b")), "a is resident still, but nobody uses it"


def test_one_load_at_a_time(residency: Residency) -> None:
    residency.enter(some("a"))
    assert residency.may_join(some("a"))
    assert not residency.may_join(some("b"))
    residency.settle(moved=True)
    assert residency.may_join(some("b"))


def test_a_doubtful_r_is_joined_only_by_units_in_use(residency: Residency) -> None:
    loaded(residency, "a")
    residency.enter(some("b"))
    residency.leave(some("b"), loading=True, failed=False)
    assert (residency.uncertain, residency.resident) == (True, some("a"))
    assert residency.may_join(some("a"))
    assert not residency.may_join(some("b"))


def test_a_lease_that_ends_in_order_leaves_no_doubt(residency: Residency) -> None:
    loaded(residency, "a").leave(some("a"), loading=False, failed=False)
    assert (residency.uncertain, residency.resident, residency.in_use) == (False, some("a"), Counter())


def test_a_unit_stays_while_another_lease_holds_it(residency: Residency) -> None:
    residency.enter(some("a"))
    residency.enter(some("a"))
    residency.leave(some("a"), loading=True, failed=False)
    assert residency.resident == some("a")
    residency.leave(some("a"), loading=True, failed=False)
    assert (residency.resident, residency.loading) == (some(""), 0)


def test_in_doubt_only_proved_units_need_no_load(residency: Residency) -> None:
    loaded(residency, "a")
    residency.enter(some("b"))
    residency.leave(some("b"), loading=True, failed=False)
    assert residency.enter(some("a")) == (False, some(""))
    residency.fail(some("a"))
    assert residency.enter(some("a")) == (True, some(""))
    residency.answered(some("a"))
    assert residency.enter(some("a")) == (False, some(""))


def test_a_unit_is_proved_only_while_it_is_in_use(residency: Residency) -> None:
    loaded(residency, "a").leave(some("a"), loading=False, failed=False)
    assert residency.proved == some("")


def test_a_report_replaces_r_but_never_takes_a_unit_in_use(residency: Residency, clock: Clock) -> None:
    loaded(residency, "a")
    clock.now = 2.0
    assert residency.report(some("x"), asked=1.0)
    assert residency.resident == some("ax")


def test_r_is_a_frozenset_whatever_happens(residency: Residency, clock: Clock) -> None:
    """A router may keep what it is asked; a set is neither hashable nor safe to keep."""
    loaded(residency, "a")
    clock.now = 2.0
    residency.report({"x"}, asked=1.0)
    assert type(residency.resident) is frozenset
    residency.enter(some("b"))
    residency.leave(some("b"), loading=True, failed=False)
    assert type(residency.resident) is frozenset
    assert type(residency.proved) is frozenset


@pytest.mark.parametrize("asked", [0.0, 1.0])
def test_a_report_asked_for_before_or_at_the_last_change_is_stale(
    residency: Residency, clock: Clock, asked: float
) -> None:
    clock.now = 1.0
    loaded(residency, "a")
    clock.now = 2.0
    assert not residency.report(some(""), asked=asked)
    assert residency.report(some(""), asked=1.5)


def test_a_report_during_a_load_is_ignored(residency: Residency, clock: Clock) -> None:
    residency.enter(some("a"))
    clock.now = 2.0
    assert not residency.report(some("a"), asked=1.0)
    residency.settle(moved=True)
    clock.now = 4.0
    assert not residency.report(some(""), asked=1.0), "asked for during the load"
    assert residency.report(some("a"), asked=3.0)


def test_a_report_while_a_failed_lease_is_held_is_ignored(residency: Residency, clock: Clock) -> None:
    loaded(residency, "a").fail(some("a"))
    assert residency.uncertain
    clock.now = 2.0
    assert not residency.report(some(""), asked=1.0)
    residency.leave(some("a"), loading=False, failed=True)
    clock.now = 4.0
    assert not residency.report(some(""), asked=1.0)
    assert residency.report(some(""), asked=3.0)
    assert not residency.uncertain


def test_a_warm_grant_that_stops_nothing_does_not_age_a_report(residency: Residency, clock: Clock) -> None:
    loaded(residency, "a")
    clock.now = 2.0
    residency.enter(some("a"))
    residency.settle(moved=False)
    assert residency.report(some("ab"), asked=1.0)


@pytest.mark.parametrize("router", [ClassRouter(), TableRouter({"a": some("b")})])
def test_a_resident_unit_that_stops_another_changes_r(clock: Clock, router: Router) -> None:
    residency = Residency(router, clock)
    residency.resident = some("ab")
    clock.now = 1.0
    assert residency.enter(some("a")) == (False, some("b"))
    residency.settle(moved=True)
    assert residency.resident == some("a")
    assert not residency.report(some("ab"), asked=0.5)


def test_subtract_forgets_names_at_zero() -> None:
    counter = Counter("aab")
    subtract(counter, some("ab"))
    assert counter == Counter("a")
    assert list(counter) == ["a"]
