"""What is known of llama-swap, as it changes: whole or not at all, and never because a client asks often."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import proxy.knowledge
from proxy.classify import Classifier
from proxy.errors import SettingsError, UnknownModel
from proxy.knowledge import Knowledge
from proxy.routes import NameIn, Route, match_route
from proxy.settings import Settings

BODY = Route(NameIn.BODY)


class File:
    """A configuration whose every writing can be told by its time, as two seconds apart from the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._time = 1_000_000_000

    def write(self, text: str, path: Path | None = None) -> None:
        path = path or self.path
        path.write_text(text)
        self._time += 2
        os.utime(path, (self._time, self._time))


@pytest.fixture
def file(tmp_path: Path) -> File:
    file = File(tmp_path / "config.yaml")
    file.write("apiKeys: [k1, k2]\nmodels: {a: {}}\nprofiles: {night: {pins: {x: a}}}")
    return file


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [100.0]
    monkeypatch.setattr("proxy.knowledge.time.monotonic", lambda: now[0])
    return now


def knowledge(path: Path | None, environ: dict[str, str] | None = None, **values: Any) -> Knowledge:
    return Knowledge(Settings.model_validate({"llama_swap_config": path, **values}), environ or {})


def models(known: Knowledge) -> list[str]:
    return list(known.classifier.known_models)


@contextlib.contextmanager
def changes(known: Knowledge) -> Iterator[list[Classifier]]:
    """The classifiers that are told while the block runs."""
    told: list[Classifier] = []
    known.on_change = told.append
    yield told


# --- the file


def test_the_file_is_read_at_the_start(file: File) -> None:
    with capture_logs() as lines:
        known = knowledge(file.path)
    assert (known.from_file, known.api_keys, models(known)) == (True, ("k1", "k2"), ["a", "x"])
    assert [(line["event"], line["source"], line["models"]) for line in lines] == [("names_from", str(file.path), 1)]


def test_a_broken_file_ends_the_start(file: File) -> None:
    file.write("models: [")
    with pytest.raises(SettingsError):
        knowledge(file.path)


def test_llama_swaps_variables_are_those_that_are_handed_over(file: File) -> None:
    file.write("models: {'${env.NAME}': {}}")
    assert models(knowledge(file.path, {"NAME": "n"})) == ["n"]
    with pytest.raises(SettingsError, match="NAME"):
        knowledge(file.path)


def test_what_is_passed_over_is_one_line_of_the_log_without_keys(file: File) -> None:
    file.write("apiKeys: [hunter2]\nmodels: {a: {madeup: 1}}\nother: 1")
    with capture_logs() as lines:
        knowledge(file.path)
    (notes,) = [line for line in lines if line["event"] == "llama_swap_config_notes"]
    assert len(notes["ignored"]) == 2
    assert "hunter2" not in str(lines)


def test_a_reload_puts_a_whole_new_classifier_in_place_and_tells_once(file: File) -> None:
    known = knowledge(file.path)
    before = known.classifier
    with changes(known) as told:
        file.write("apiKeys: [k3]\nmodels: {b: {}}")
        assert known.classifier is before
        assert known.reload()
    assert told == [known.classifier]
    assert (models(known), known.api_keys) == (["b"], ("k3",))
    assert before.known_models == ("a", "x"), "who holds the old one goes on with it"


@pytest.mark.parametrize(
    "text", ["models: [", "models: {a: {concurrencyLimit: x}}", "models: {'${env.NOT_SET}': {}}", None]
)
def test_a_broken_or_vanished_file_keeps_the_old_one_and_is_told_once(file: File, text: str | None) -> None:
    known = knowledge(file.path)
    before = known.classifier
    if text is None:
        file.path.unlink()
    else:
        file.write(text)
    with changes(known) as told, capture_logs() as lines:
        assert not known.look()
        assert not known.look(), "it is read again only once it has changed again"
    assert (known.classifier, told) == (before, [])
    assert [(line["event"], line["log_level"]) for line in lines] == [("llama_swap_config_broken", "error")]
    file.write("models: {b: {}}")
    assert known.look()
    assert models(known) == ["b"]


def test_no_key_is_in_the_log_when_the_file_breaks(file: File) -> None:
    known = knowledge(file.path)
    file.write("apiKeys: [hunter2, 'hunter2 x']\nmodels: {a: {}}")
    with capture_logs() as lines:
        assert not known.reload()
    assert "hunter2" not in str(lines)


@pytest.mark.parametrize("change", ["time", "size", "both"])
def test_a_look_sees_a_new_time_and_a_new_size(file: File, change: str) -> None:
    file.write("models: {a: {}}")
    known = knowledge(file.path)
    assert not known.look()
    times = (file.path.stat().st_atime_ns, file.path.stat().st_mtime_ns)
    file.write("models: {b: {}}" if change == "time" else "models: {b: {}} # longer")
    if change == "size":
        os.utime(file.path, ns=times)
    assert known.look()
    assert models(known) == ["b"]


def test_a_file_that_is_replaced_as_editors_do_is_seen(file: File, tmp_path: Path) -> None:
    known = knowledge(file.path)
    file.write("models: {b: {}}", tmp_path / "new")
    (tmp_path / "new").rename(file.path)
    assert known.look()
    assert models(known) == ["b"]


# --- a directory


def test_in_a_directory_a_new_a_changed_and_a_removed_file_are_seen(file: File, tmp_path: Path) -> None:
    known = knowledge(tmp_path)
    for name, text, expected in (
        ("more.yml", "models: {b: {}}", ["a", "b", "x"]),
        ("more.yml", "models: {c: {}}", ["a", "c", "x"]),
        ("more.yml", None, ["a", "x"]),
    ):
        if text is None:
            (tmp_path / name).unlink()
        else:
            file.write(text, tmp_path / name)
        assert known.look()
        assert models(known) == expected
    file.write("models: {z: {}}", tmp_path / "notes.txt")
    assert not known.look()


def test_an_emptied_directory_keeps_what_was_there(file: File, tmp_path: Path) -> None:
    known = knowledge(tmp_path)
    file.path.unlink()
    assert not known.look()
    assert models(known) == ["a", "x"]


# --- unknown names


def test_a_name_that_the_file_has_since_a_moment_is_found(file: File, clock: list[float]) -> None:
    known = knowledge(file.path)
    file.write("models: {a: {}, new: {}}")
    assert known.classify(BODY, "new").model == "new"


def test_a_path_below_upstream_that_the_file_has_since_a_moment_is_found(file: File, clock: list[float]) -> None:
    known = knowledge(file.path)
    route = known.refine(match_route("GET", b"/upstream/new/er/x"))
    file.write("models: {new/er: {}}")
    assert known.classify(route, None).model == "new/er"


def test_unknown_names_make_it_look_at_the_file_at_most_once_a_second(
    file: File, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = knowledge(file.path)
    looks: list[float] = []

    def look() -> bool:
        looks.append(clock[0])
        return False

    monkeypatch.setattr(known, "look", look)
    for number in range(50):
        clock[0] = 100 + number / 10
        with pytest.raises(UnknownModel):
            known.classify(BODY, f"invented-{number}")
        assert known.classify(BODY, "a").model == "a"
    assert looks == [100, 101, 102, 103, 104]


def test_an_unknown_name_does_not_make_it_read_a_file_that_has_not_changed(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = knowledge(file.path)
    monkeypatch.setattr(proxy.knowledge, "load", lambda *_: pytest.fail("it was read"))
    with pytest.raises(UnknownModel):
        known.classify(BODY, "new")


# --- watching


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - a file says nothing when it has been read
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def watching(known: Knowledge) -> Any:
    task = asyncio.create_task(known.watch())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy.knowledge, "WATCH_SECONDS", 0.005)


async def test_a_change_is_picked_up_and_a_broken_file_does_not_end_the_watch(file: File, quick: None) -> None:
    known = knowledge(file.path)
    async with watching(known) as task:
        file.write("models: {b: {}}")
        await until(lambda: models(known) == ["b"])
        with capture_logs() as lines:
            file.write("models: [")
            await until(lambda: bool(lines))
        file.write("models: {c: {}}")
        await until(lambda: models(known) == ["c"])
        assert not task.done()


async def test_without_a_file_or_with_watch_config_off_nothing_is_watched(file: File, quick: None) -> None:
    for known in (knowledge(None), knowledge(file.path, watch_config=False)):
        async with asyncio.timeout(5):
            await known.watch()
    assert knowledge(file.path, watch_config=False).reload(), "SIGHUP still reads it"


# --- the listing


def listing(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": list(entries)}


def entry(name: str, status: str = "unloaded", **meta: Any) -> dict[str, Any]:
    return {"id": name, "created": 1, "status": {"value": status}, "meta": {"llamaswap": meta}}


def test_until_the_listing_is_there_the_settings_decide(file: File) -> None:
    with capture_logs() as lines:
        known = knowledge(None)
    assert (known.from_file, known.api_keys, known.reload()) == (False, (), False)
    assert known.classify(BODY, "kokoro").class_name == "tts"
    assert lines == [
        *({"event": "names_from", "source": "settings", "until": "llama-swap lists its models", "log_level": "info"},)
    ]


def test_the_listing_gives_names_and_says_once_that_it_does() -> None:
    known = knowledge(None)
    with changes(known) as told, capture_logs() as lines:
        known.take_listing(listing(entry("a", aliases=["x"])))
        known.take_listing(listing(entry("a", aliases=["x"]), entry("b")))
    assert known.classify(BODY, "x").model == "a"
    assert (len(told), told[-1]) == (2, known.classifier)
    assert [(line["event"], line["source"]) for line in lines] == [("names_from", "listing")]


def test_a_listing_that_says_the_same_changes_nothing() -> None:
    known = knowledge(None)
    known.take_listing(listing(entry("a")))
    with changes(known) as told:
        known.take_listing(listing(entry("a", status="loaded") | {"created": 2}))
    assert told == []


@pytest.mark.parametrize(
    "changed",
    [
        entry("s", type="selector", strategy="pin", targets=["b", "a"]),
        entry("s", type="selector", strategy="warm", targets=["a", "b"]),
        entry("s", peerID="there"),
    ],
)
def test_a_listing_in_which_a_name_means_something_else_is_a_change(changed: dict[str, Any]) -> None:
    known = knowledge(None)
    known.take_listing(listing(entry("a"), entry("b"), entry("s", type="selector", strategy="pin", targets=["a", "b"])))
    before = known.classify(BODY, "s")
    with changes(known) as told:
        known.take_listing(listing(entry("a"), entry("b"), changed))
    assert len(told) == 1
    assert known.classify(BODY, "s") != before


@pytest.mark.parametrize("body", [None, [], {}, {"data": 5}, "x", {"error": "unauthorized"}])
def test_a_listing_that_is_none_keeps_the_old_one(body: Any) -> None:
    known = knowledge(None)
    known.take_listing(listing(entry("a", aliases=["x"])))
    with changes(known) as told, capture_logs() as lines:
        known.take_listing(body)
    assert (told, [line["event"] for line in lines]) == ([], ["listing_unreadable"])
    assert known.classify(BODY, "x").model == "a"


def test_where_there_is_a_file_the_listing_does_not_count(file: File) -> None:
    known = knowledge(file.path)
    with changes(known) as told:
        known.take_listing(listing(entry("b")))
    assert (told, models(known)) == ([], ["a", "x"])


# --- the profile


def test_the_active_profile_counts_from_the_next_request_on(file: File) -> None:
    known = knowledge(file.path)
    with pytest.raises(UnknownModel):
        known.classify(BODY, "x")
    with capture_logs() as lines:
        for _ in range(3):
            known.take_profile("night")
    assert [line["active"] for line in lines] == ["night"]
    assert known.classify(BODY, "x").model == "a"
    assert known.refine(match_route("GET", b"/upstream/x/y")).name_in is NameIn.PATH
    known.take_profile(None)
    with pytest.raises(UnknownModel):
        known.classify(BODY, "x")


def test_a_profile_outlives_a_reload_that_still_has_it(file: File) -> None:
    known = knowledge(file.path)
    known.take_profile("night")
    file.write("models: {b: {}}\nprofiles: {night: {pins: {x: b}}}")
    assert known.look()
    assert known.classify(BODY, "x").model == "b"
    file.write("models: {b: {}}")
    assert known.look()
    assert known.classify(BODY, "b").model == "b"
