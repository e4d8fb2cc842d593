"""R: what a grant, an end, a failure and a report make of it."""

from __future__ import annotations

from collections import Counter

import pytest

from proxy.residency import Effect, Residency, subtract
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
        load = residency.enter(some(name))
        residency.answered(some(name))
        residency.settle(load)
    return residency


def test_a_grant_takes_out_what_it_stops_and_puts_in_its_own(residency: Residency) -> None:
    assert residency.enter(some("a")) == Effect(some("a"), cold=True)
    assert residency.enter(some("x")) == Effect(some("x"), cold=True)
    assert residency.resident == some("ax")
    assert residency.enter(some("b")) == Effect(some("b"), cold=True, stops=some("a"))
    assert residency.resident == some("xb")
    assert residency.in_use == Counter("axb")


def test_a_grant_of_what_is_resident_needs_no_load(residency: Residency) -> None:
    loaded(residency, "a")
    assert residency.holds(some("a"))
    assert not residency.holds(some("ab"))
    assert residency.enter(some("a")) == Effect(some("a"))
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
    residency.leave(Effect(some("a")), loading=False, failed=False)
    assert residency.may_join(some("b")), "a is resident still, but nobody uses it"


def test_one_load_at_a_time(residency: Residency) -> None:
    load = residency.enter(some("a"))
    assert residency.may_join(some("a"))
    assert not residency.may_join(some("b"))
    residency.settle(load)
    assert residency.may_join(some("b"))


NEIGHBOURS = TableRouter({"a": some("z"), "b": some("z"), "x": some("y")})


def test_nobody_joins_who_would_stop_what_a_swap_under_way_stops(clock: Clock) -> None:
    residency = Residency(NEIGHBOURS, clock)
    loaded(residency, "bx").resident |= some("z")
    load = residency.enter(some("a"))
    assert load == Effect(some("a"), cold=True, stops=some("z"))
    assert not residency.may_join(some("b")), "resident, and it stops nothing of R, but z is there still"
    assert residency.may_join(some("x"))
    assert residency.may_join(some("a")), "this joins the swap itself"
    assert not residency.may_join(some("ab"))
    residency.settle(load)
    assert residency.may_join(some("b"))


def given_up(clock: Clock) -> tuple[Residency, Effect]:
    """b is in use; a load of a, which stops z, was given up."""
    residency = loaded(Residency(NEIGHBOURS, clock), "b")
    residency.resident |= some("z")
    effect = residency.enter(some("a"))
    residency.leave(effect, loading=True, failed=False)
    assert residency.uncertain
    assert not residency.may_join(some("b"))
    return residency, effect


def test_a_swap_that_was_given_up_goes_on_until_a_report(clock: Clock) -> None:
    residency, _ = given_up(clock)
    clock.now = 2.0
    assert residency.report(some("ab"), asked=1.0)
    assert residency.may_join(some("b"))


def test_a_swap_that_was_given_up_goes_on_until_its_models_answer(clock: Clock) -> None:
    residency, _ = given_up(clock)
    again = residency.enter(some("a"))
    assert not residency.may_join(some("b"))
    residency.answered(some("a"))
    residency.settle(again)
    assert residency.may_join(some("b"))


def test_a_swap_that_was_given_up_goes_on_until_its_models_fail(clock: Clock) -> None:
    residency, _ = given_up(clock)
    again = residency.enter(some("a"))
    residency.fail(some("a"))
    residency.settle(again)
    assert residency.may_join(some("b"))


def test_a_swap_that_was_given_up_delays_nobody_once_nothing_is_in_use(clock: Clock) -> None:
    residency, _ = given_up(clock)
    residency.leave(Effect(some("b")), loading=False, failed=False)
    residency.settle(residency.enter(some("b")))
    assert residency.may_join(some("b"))


def test_a_model_whose_swap_was_given_up_may_be_there_and_is_not_to_be_stopped(clock: Clock) -> None:
    residency = loaded(Residency(TableRouter({"b": some("a")}), clock), "b")
    residency.leave(residency.enter(some("a")), loading=True, failed=False)
    assert not residency.may_join(some("b"))


def test_a_visitor_is_of_r_from_its_grant_on_unless_it_fails(residency: Residency, clock: Clock) -> None:
    residency.visit(some("c"))
    residency.visit(some("c"))
    assert (residency.resident, residency.in_use) == (some("c"), Counter())
    clock.now = 2.0
    assert residency.report(some(""), asked=1.0)
    assert residency.resident == some("c"), "it may be loading still"
    residency.end_visit(some("c"), failed=True)
    assert residency.resident == some("c"), "the other may have loaded it"
    residency.end_visit(some("c"), failed=True)
    assert residency.resident == some("")


def test_a_visitor_that_had_to_be_loaded_makes_older_reports_stale(residency: Residency, clock: Clock) -> None:
    clock.now = 2.0
    residency.visit(some("c"))
    residency.end_visit(some("c"), failed=False)
    assert not residency.report(some(""), asked=1.0)
    residency.visit(some("c"))
    assert residency.report(some(""), asked=3.0)


def test_a_class_that_takes_no_lease_is_not_of_r(clock: Clock) -> None:
    residency = Residency(ClassRouter(), clock)
    residency.visit(some("e"))
    assert residency.resident == some("")


def test_of_two_swaps_that_stop_the_same_each_keeps_others_out(clock: Clock) -> None:
    residency = Residency(NEIGHBOURS, clock)
    loaded(residency, "b").resident |= some("az")
    first = residency.enter(some("a"))
    residency.resident |= some("z")
    second = residency.enter(some("a"))
    assert first == second == Effect(some("a"), stops=some("z"))
    residency.settle(first)
    assert not residency.may_join(some("b"))
    residency.settle(second)
    assert residency.may_join(some("b"))


def test_a_doubtful_r_is_joined_only_by_units_in_use(residency: Residency) -> None:
    loaded(residency, "a")
    load = residency.enter(some("b"))
    residency.leave(load, loading=True, failed=False)
    assert (residency.uncertain, residency.resident) == (True, some("a"))
    assert residency.may_join(some("a"))
    assert not residency.may_join(some("b"))


def test_a_lease_that_ends_in_order_leaves_no_doubt(residency: Residency) -> None:
    loaded(residency, "a").leave(Effect(some("a")), loading=False, failed=False)
    assert (residency.uncertain, residency.resident, residency.in_use) == (False, some("a"), Counter())


def test_a_unit_stays_while_another_lease_holds_it(residency: Residency) -> None:
    first, second = residency.enter(some("a")), residency.enter(some("a"))
    residency.leave(first, loading=True, failed=False)
    assert residency.resident == some("a")
    residency.leave(second, loading=True, failed=False)
    assert (residency.resident, residency.loading) == (some(""), 0)


def test_in_doubt_only_proved_units_need_no_load(residency: Residency) -> None:
    loaded(residency, "a")
    load = residency.enter(some("b"))
    residency.leave(load, loading=True, failed=False)
    assert residency.enter(some("a")) == Effect(some("a"))
    residency.fail(some("a"))
    assert residency.enter(some("a")) == Effect(some("a"), cold=True)
    residency.answered(some("a"))
    assert residency.enter(some("a")) == Effect(some("a"))


def test_a_unit_is_proved_only_while_it_is_in_use(residency: Residency) -> None:
    loaded(residency, "a").leave(Effect(some("a")), loading=False, failed=False)
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
    load = residency.enter(some("b"))
    residency.leave(load, loading=True, failed=False)
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
    load = residency.enter(some("a"))
    clock.now = 2.0
    assert not residency.report(some("a"), asked=1.0)
    residency.settle(load)
    clock.now = 4.0
    assert not residency.report(some(""), asked=1.0), "asked for during the load"
    assert residency.report(some("a"), asked=3.0)


def test_a_report_while_a_failed_lease_is_held_is_ignored(residency: Residency, clock: Clock) -> None:
    loaded(residency, "a").fail(some("a"))
    assert residency.uncertain
    clock.now = 2.0
    assert not residency.report(some(""), asked=1.0)
    residency.leave(Effect(some("a")), loading=False, failed=True)
    clock.now = 4.0
    assert not residency.report(some(""), asked=1.0)
    assert residency.report(some(""), asked=3.0)
    assert not residency.uncertain


def test_a_warm_grant_that_stops_nothing_does_not_age_a_report(residency: Residency, clock: Clock) -> None:
    loaded(residency, "a")
    clock.now = 2.0
    residency.settle(residency.enter(some("a")))
    assert residency.report(some("ab"), asked=1.0)


@pytest.mark.parametrize("router", [ClassRouter(), TableRouter({"a": some("b")})])
def test_a_resident_unit_that_stops_another_changes_r(clock: Clock, router: Router) -> None:
    residency = Residency(router, clock)
    residency.resident = some("ab")
    clock.now = 1.0
    load = residency.enter(some("a"))
    assert load == Effect(some("a"), stops=some("b"))
    residency.settle(load)
    assert residency.resident == some("a")
    assert not residency.report(some("ab"), asked=0.5)


def test_subtract_forgets_names_at_zero() -> None:
    counter = Counter("aab")
    subtract(counter, some("ab"))
    assert counter == Counter("a")
    assert list(counter) == ["a"]
