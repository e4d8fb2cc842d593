"""Loads are measured as a waiting client would: from the old model's stop to the new one's readiness."""

from __future__ import annotations

from proxy.loads import Load, LoadTimes, StateHistory


def run(*snapshots: tuple[float, dict[str, str]]) -> list[Load]:
    """All loads that a series of snapshots shows."""
    history = StateHistory()
    return [load for at, states in snapshots for load in history.see(states, at)]


def test_a_first_load_counts_from_its_start() -> None:
    assert run((0, {}), (1, {"a": "starting"}), (4, {"a": "ready"})) == [Load("a", 1, 1, 4)]


def test_a_swap_counts_from_the_old_models_stop() -> None:
    loads = run(
        (0, {"a": "ready"}),
        (10, {"a": "stopping"}),
        (12, {"a": "stopped"}),
        (12.01, {"a": "stopped", "b": "starting"}),
        (15, {"a": "stopped", "b": "ready"}),
    )
    assert [(load.model, load.seconds, load.starting) for load in loads] == [("b", 5, 12.01)]


def test_a_stop_that_was_merged_away_counts_from_where_the_old_model_was_gone() -> None:
    loads = run((0, {"a": "ready"}), (10, {"b": "starting"}), (13, {"b": "ready"}))
    assert [load.seconds for load in loads] == [3]


def test_a_stop_by_ttl_long_before_does_not_count() -> None:
    loads = run((0, {"a": "ready"}), (1, {"a": "stopping"}), (2, {}), (60, {"b": "starting"}), (63, {"b": "ready"}))
    assert [load.seconds for load in loads] == [3]


def test_repeated_snapshots_change_nothing() -> None:
    starting = {"a": "starting"}
    loads = run((0, {}), (1, starting), (2, starting), (4, {"a": "ready"}), (5, {"a": "ready"}))
    assert [load.seconds for load in loads] == [3]


def test_a_failed_load_is_not_a_load_and_a_later_one_starts_afresh() -> None:
    loads = run((1, {"a": "starting"}), (2, {"a": "stopped"}), (10, {"a": "starting"}), (12, {"a": "ready"}))
    assert [load.seconds for load in loads] == [2]


def test_a_load_whose_beginning_was_not_seen_is_not_measured() -> None:
    history = StateHistory()
    assert history.see({"a": "ready"}, 5) == []
    history.see({"b": "starting"}, 6)
    history.forget()
    assert history.see({"b": "ready"}, 9) == []


def test_two_loads_at_once_are_told_apart() -> None:
    loads = run(
        (0, {}),
        (1, {"a": "starting", "e": "starting"}),
        (2, {"a": "starting", "e": "ready"}),
        (5, {"a": "ready", "e": "ready"}),
    )
    assert [(load.model, load.seconds) for load in loads] == [("e", 1), ("a", 4)]


def test_the_last_measurement_of_a_unit_is_kept_and_unknown_units_have_none() -> None:
    times = LoadTimes()
    times.record("a", 3)
    times.record("a", 5)
    times.record("b", -1)
    assert (times.get("a"), times.get("b"), times.get("c")) == (5, 0, None)
    assert times.all() == {"a": 5, "b": 0}


def test_names_without_end_do_not_fill_the_memory() -> None:
    times = LoadTimes()
    for number in range(5000):
        times.record(f"m{number}", 1)
    assert len(times.all()) == 1000
