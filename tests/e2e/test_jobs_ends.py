"""Every place where a job can stand when it is cancelled or the proxy ends, and what is left of it.

The rows are the places: in the queue, with the lease but not yet on disk as running, sent but not answered, and in the
middle of its answer. The columns are a cancellation, the two kinds of signal, and a restart. (A kill at any moment is
test_jobs_crash.py.)
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jobs_support import (
    ASYNC,
    SPEECH,
    echo,
    finished,
    job_at,
    modes,
    result,
    said,
    speech,
    submit,
    until,
    until_files,
)

from harness import CHAT, TTS, InProcess, Proxy, RawClient, Upstream, after, answer, begun, hang
from proxy.jobs.job import Job
from proxy.jobs.recorder import Recorder

GRACE = 0.05


@dataclass
class Scene:
    """A proxy, an upstream, and a job that has come to its place."""

    proxy: InProcess
    upstream: Upstream
    stack: contextlib.AsyncExitStack
    location: str = ""
    unblock: threading.Event | None = None

    @property
    def on_disk(self) -> list[Job]:
        return self.proxy.app._jobs.store.table.all()

    async def client(self) -> RawClient:
        return await self.stack.enter_async_context(RawClient(self.proxy.port))

    async def held(self, count: int) -> None:
        await self.proxy.until(lambda: len(self.proxy.app.leases.lock.held) == count)

    def block(self, monkeypatch: pytest.MonkeyPatch, call: str) -> threading.Event:
        """Hold up one call of the table until the event that is returned is set; `entered` tells of the call."""
        table, entered, unblock = self.proxy.app._jobs.store.table, threading.Event(), threading.Event()
        original = getattr(table, call)

        def blocked(*args: Any) -> Any:
            entered.set()
            unblock.wait(20)
            return original(*args)

        monkeypatch.setattr(table, call, blocked)
        self.stack.callback(unblock.set)
        self.unblock = unblock
        return entered


Place = Callable[[Scene, pytest.MonkeyPatch], Awaitable[None]]


async def queued(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a chat."""
    scene.upstream.by_model = {"chat-a": hang()}
    (await scene.client()).chat()
    await scene.held(1)
    scene.location = await submit(scene.proxy)


async def granted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lease, while *running* is being written down."""
    entered = scene.block(monkeypatch, "begin")
    scene.location = await submit(scene.proxy)
    await scene.held(1)
    await scene.proxy.until(entered.is_set)


async def before_the_head(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent, and nothing has come."""
    scene.upstream.script = hang()
    scene.location = await submit(scene.proxy)
    await scene.upstream.wait_for(bool)


async def in_the_body(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the answer has come."""
    scene.upstream.script = begun(asyncio.Event())
    scene.location = await submit(scene.proxy, CHAT, "/v1/chat/completions")
    await until(scene.proxy, scene.location, "running")
    entry = next(iter(scene.proxy.app._jobs.shelf))
    await scene.proxy.until(lambda: entry.recorder is not None and entry.recorder.size > 200)


PLACES: list[Place] = [queued, granted, before_the_head, in_the_body]
every_place = pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)


@contextlib.asynccontextmanager
async def scene_at(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **settings: Any
) -> AsyncIterator[Scene]:
    """A job that stands at `place`."""
    async with (
        Upstream() as upstream,
        InProcess(upstream.url, data_dir=tmp_path, **settings) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        scene = Scene(proxy, upstream, stack)
        await place(scene, monkeypatch)
        yield scene


async def both_classes_work(scene: Scene) -> None:
    scene.upstream.by_model, scene.upstream.script = {}, answer()
    for path, body in ((SPEECH, TTS), ("/v1/chat/completions", CHAT)):
        assert (await scene.proxy.client.post(path, json=body, timeout=2)).status_code == 200
    await scene.proxy.idle()


# --- a cancellation


@every_place
async def test_a_job_can_be_cancelled_at_every_place(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with scene_at(place, monkeypatch, tmp_path) as scene:
        before = len(scene.upstream.seen)
        cancelling = asyncio.create_task(scene.proxy.client.delete(scene.location))
        others = 1 if place is queued else 0
        await scene.held(others)  # before anything is written
        if scene.unblock is not None:
            assert not cancelling.done()
            scene.unblock.set()
        cancelled = await cancelling
        assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
        (job,) = scene.on_disk
        assert job.state == "cancelled"
        assert (job.started_at is not None) is (place in {before_the_head, in_the_body})
        fetched = await result(scene.proxy, scene.location)
        assert (fetched.status_code, fetched.json()["error"]["code"]) == (410, "job_cancelled")
        assert (await scene.proxy.client.delete(scene.location)).json() == cancelled.json(), "once is enough"
        if place in {before_the_head, in_the_body}:
            await asyncio.wait_for(scene.upstream.seen[0].closed.wait(), 5)
        assert len(scene.upstream.seen) == before, "a job that was not sent is not"
        await scene.stack.aclose()
        await scene.upstream.quiet(within=2)
        await both_classes_work(scene)
        assert len(scene.upstream.seen) == before + 2, "nor is it sent later"
        await until_files(tmp_path, set())
        assert scene.proxy.app._jobs.shelf.used == 0


@pytest.mark.parametrize("place", PLACES[1:], ids=lambda place: place.__name__)
async def test_a_cancelled_job_gives_its_lease_back_before_it_awaits_anything(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with scene_at(place, monkeypatch, tmp_path) as scene:
        (entry,) = scene.proxy.app._jobs.shelf
        cancelling = asyncio.create_task(scene.proxy.app._jobs.cancel(entry))
        for _ in range(5):  # as many steps as the cancellation needs to come down to the innermost await
            await asyncio.sleep(0)
        assert not scene.proxy.app.leases.lock.held
        if scene.unblock is not None:
            scene.unblock.set()
        await cancelling
        assert entry.job.state == "cancelled"


async def test_a_finished_job_stays_what_it_is(tmp_path: Path) -> None:
    async with Upstream(echo()) as upstream, InProcess(upstream.url, data_dir=tmp_path) as proxy:
        location = await submit(proxy)
        done = await finished(proxy, location)
        assert (await proxy.client.delete(location)).json() == done
        assert (await result(proxy, location)).content == b"audio of x"


@pytest.mark.parametrize("step", ["the file", "the table"])
async def test_a_job_whose_answer_has_come_whole_is_no_longer_cancelled(
    step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The lease is free by then; the cancellation waits for what is being written down, and tells it."""
    async with (
        Upstream(echo()) as upstream,
        InProcess(upstream.url, data_dir=tmp_path) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        scene = Scene(proxy, upstream, stack)
        if step == "the table":
            entered = scene.block(monkeypatch, "finish")
        else:
            monkeypatch.setattr(proxy.app._jobs.store.table, "sync", lambda: None, raising=False)
            entered = scene.block(monkeypatch, "sync")
            blocked = proxy.app._jobs.store.table.sync  # type: ignore[attr-defined]
            monkeypatch.setattr(Recorder, "complete", _synced_by(blocked, Recorder.complete))
        location = await submit(proxy)
        await proxy.until(entered.is_set)
        await scene.held(0)
        cancelling = asyncio.create_task(proxy.client.delete(location))
        assert (await job_at(proxy, location))["status"] == "running"
        assert scene.unblock is not None
        scene.unblock.set()
        assert (await cancelling).json()["status"] == "succeeded"
        assert (await result(proxy, location)).status_code == 200
        await proxy.idle()


def _synced_by(sync: Callable[[], None], complete: Callable[[Recorder], Awaitable[None]]) -> Any:
    async def slowly(recorder: Recorder) -> None:
        await asyncio.to_thread(sync)
        await complete(recorder)

    return slowly


async def test_an_engine_that_must_not_be_cut_off_works_to_its_end(tmp_path: Path) -> None:
    end = asyncio.Event()
    classes = {"tts": {"on_disconnect": "drain"}}
    async with (
        Upstream(after(end, answer(b"x" * 100_000))) as upstream,
        InProcess(upstream.url, data_dir=tmp_path, classes=classes) as proxy,
    ):
        location = await submit(proxy)
        await upstream.wait_for(bool)
        assert (await proxy.client.delete(location)).json()["status"] == "cancelled"
        assert len(proxy.app.leases.lock.held) == 1
        assert not upstream.seen[0].closed.is_set()
        end.set()
        await proxy.idle()
        assert proxy.metric("gpu_lease_exchanges_total", **{"class": "tts", "outcome": "ok"}) == 1
        assert (await job_at(proxy, location))["status"] == "cancelled"
        await until_files(tmp_path, set())
        assert proxy.app._jobs.shelf.used == 0


@pytest.mark.parametrize("call", ["insert", "file"])
async def test_a_client_that_leaves_before_it_is_answered_leaves_no_job(
    call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would never learn the id. What is being written at that moment is removed behind it."""
    async with (
        Upstream() as upstream,
        InProcess(upstream.url, data_dir=tmp_path) as proxy,
        contextlib.AsyncExitStack() as stack,
    ):
        scene = Scene(proxy, upstream, stack)
        store = proxy.app._jobs.store
        if call == "file":
            monkeypatch.setattr(store.table, "create", store.folder.create, raising=False)
            entered = scene.block(monkeypatch, "create")
            monkeypatch.setattr(store.folder, "create", store.table.create)  # type: ignore[attr-defined]
        else:
            entered = scene.block(monkeypatch, call)
        client = await scene.client()
        client.tts("Prefer: respond-async")
        await proxy.until(entered.is_set)
        client.reset()
        await proxy.until(lambda: not list(proxy.app._jobs.shelf))
        assert scene.unblock is not None
        scene.unblock.set()
        await until_files(tmp_path, set())
        await proxy.until(lambda: not scene.on_disk)
        await both_classes_work(scene)
        assert proxy.app._jobs.shelf.used == 0
        assert len(upstream.seen) == 2


async def test_the_sweep_sees_the_task_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A lease whose task is alive is no orphan; one whose task was lost is taken back."""
    async with scene_at(before_the_head, monkeypatch, tmp_path) as scene:
        (lease,) = scene.proxy.app.leases.lock.held
        (entry,) = scene.proxy.app._jobs.shelf
        assert lease.owner.task is entry.task is not None  # type: ignore[attr-defined]
        scene.proxy.app.leases.sweep()
        assert scene.proxy.metric("gpu_lease_orphans_total") == 0
        assert lease.held
        await scene.proxy.client.delete(scene.location)


# --- the end of the proxy


@every_place
async def test_the_end_of_the_proxy_holds_nothing_and_the_next_start_knows(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with scene_at(place, monkeypatch, tmp_path, shutdown_grace=GRACE) as scene:
        scene.proxy.signal()
        if place is queued:
            refused = await scene.proxy.client.post(SPEECH, json=TTS, headers=ASYNC)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert (await job_at(scene.proxy, scene.location))["status"] == "queued"
        if scene.unblock is not None:
            store = scene.proxy.app._jobs.store
            close, unblock = store.close, scene.unblock

            def unblock_and_close() -> None:
                unblock.set()
                close()

            monkeypatch.setattr(store, "close", unblock_and_close)
        await scene.proxy.ended()
        await scene.proxy.idle()
        await scene.upstream.quiet(within=2)
        scene.upstream.by_model, scene.upstream.script = {}, echo()
        sent = len(scene.upstream.seen)
        async with InProcess(scene.upstream.url, data_dir=tmp_path) as again:
            job = await finished(again, scene.location)
            if place is queued:
                assert job["status"] == "succeeded"
                assert (await result(again, scene.location)).content == b"audio of x"
                assert said(scene.upstream.seen) == ["x"]
            else:
                assert (job["status"], job["error"]["code"]) == ("failed", "interrupted")
                fetched = await result(again, scene.location)
                assert (fetched.status_code, fetched.json()["error"]["code"]) == (502, "interrupted")
                assert len(scene.upstream.seen) == sent, "it is not sent again"
            await again.idle()


async def test_a_running_job_may_end_within_the_grace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its answer is written down whole, though its lease has ended and with it the time of grace."""
    end, stopping = asyncio.Event(), asyncio.Event()
    body = b"x" * 5_000_000
    complete = Recorder.complete

    async def only_then(recorder: Recorder) -> None:
        await stopping.wait()
        await complete(recorder)

    monkeypatch.setattr(Recorder, "complete", only_then)
    async with Upstream(after(end, answer(body))) as upstream:
        async with InProcess(upstream.url, data_dir=tmp_path) as proxy:
            stop = proxy.app._jobs._stop

            async def stop_and_tell() -> None:
                stopping.set()
                await stop()

            monkeypatch.setattr(proxy.app._jobs, "_stop", stop_and_tell)
            location = await submit(proxy)
            await until(proxy, location, "running")
            proxy.signal()
            end.set()
            await proxy.ended()
            await proxy.idle()
        async with InProcess(upstream.url, data_dir=tmp_path) as again:
            assert (await job_at(again, location))["status"] == "succeeded"
            assert (await result(again, location)).content == body


async def test_a_queued_job_can_be_cancelled_while_the_proxy_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with scene_at(queued, monkeypatch, tmp_path) as scene:
        scene.proxy.signal()
        await scene.proxy.until(lambda: scene.proxy.app.leases.lock.waiting_count == 0)
        assert (await scene.proxy.client.delete(scene.location)).json()["status"] == "cancelled"
        assert [job.state for job in scene.on_disk] == ["cancelled"]
        await scene.stack.aclose()
        await scene.proxy.ended()


@pytest.mark.parametrize("signals", [1, 2])
async def test_signals_end_the_process_and_the_next_start_takes_up_the_queue(signals: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data_dir": str(tmp_path), "shutdown_grace": 0.2}
    async with Upstream(hang()) as upstream:
        async with Proxy(upstream.url, **settings) as proxy:
            running = await submit(proxy, speech("running"))
            await upstream.wait_for(bool)
            waiting = await submit(proxy, speech("waiting"))
            for _ in range(signals):
                proxy.signal()
                await proxy.logged("draining")
            assert await proxy.exit_code(10) == 0
            assert not [line for line in proxy.lines if "Traceback" in line or '"exception"' in line]
        upstream.script = echo()
        async with Proxy(upstream.url, **settings) as proxy:
            assert (await finished(proxy, running))["error"]["code"] == "interrupted"
            assert (await finished(proxy, waiting))["status"] == "succeeded"
            assert said(upstream.seen) == ["running", "waiting"]
            await proxy.drained(upstream)


# --- the next start


async def test_queued_jobs_keep_their_order_whatever_the_bounds_say(tmp_path: Path) -> None:
    texts = [f"sentence {number}" for number in range(8)]
    async with Upstream() as upstream:
        upstream.by_model = {"chat-a": hang()}
        async with Proxy(upstream.url, data_dir=str(tmp_path)) as proxy, RawClient(proxy.port) as client:
            client.chat()
            await proxy.until(holders=1)
            locations = [await submit(proxy, speech(text)) for text in texts]
            assert proxy.process is not None
            proxy.process.kill()
            await proxy.process.wait()
        upstream.by_model, upstream.script = {"sentence 0": hang()}, echo()
        tight: dict[str, Any] = {"max_queue": 1, "max_queue_per_client": 1}
        async with Proxy(upstream.url, data_dir=str(tmp_path), **tight) as proxy:
            await until(proxy, locations[0], "running")
            positions = [(await job_at(proxy, location))["position"] for location in locations]
            assert positions == [None, 1, 2, 3, 4, 5, 6, 7]
            assert len((await proxy.queue())["waiters"]) == 7
            refused = await proxy.client.post(SPEECH, json=TTS, headers=ASYNC)
            assert refused.json()["error"]["code"] == "queue_full", "the bounds hold for those that come"
            job = await job_at(proxy, locations[1])
            assert job["started_at"] is None
            await proxy.client.delete(locations[0])
            for location, text in zip(locations[1:], texts[1:], strict=True):
                done = await finished(proxy, location)
                assert (done["status"], done["queued_at"] <= done["started_at"]) == ("succeeded", True)
                assert done["wait_seconds"] == pytest.approx(done["started_at"] - done["queued_at"], abs=0.2)
                assert (await result(proxy, location)).content == b"audio of " + text.encode()
            assert said(upstream.seen) == texts
            await proxy.drained(upstream)


async def test_a_name_that_llama_swap_no_longer_has_fails_its_job(tmp_path: Path) -> None:
    config = tmp_path / "llama-swap.yaml"
    config.write_text("models:\n" + "".join(f"  {name}: {{cmd: server}}\n" for name in ("chat-a", "tts-a", "tts-old")))
    settings: dict[str, Any] = {"data_dir": str(tmp_path), "llama_swap_config": str(config)}
    async with Upstream() as upstream:
        upstream.by_model = {"chat-a": hang()}
        async with Proxy(upstream.url, **settings) as proxy, RawClient(proxy.port) as client:
            client.chat()
            await proxy.until(holders=1)
            old = await submit(proxy, {**TTS, "model": "tts-old"})
            kept = await submit(proxy)
            assert proxy.process is not None
            proxy.process.kill()
            await proxy.process.wait()
        config.write_text(config.read_text().replace("tts-old", "tts-new"))
        upstream.by_model = {}
        async with Proxy(upstream.url, **settings) as proxy:
            job = await finished(proxy, old)
            assert (job["status"], job["error"]["code"]) == ("failed", "not_found")
            gone = await result(proxy, old)
            assert (gone.status_code, gone.json()["error"]["message"]) == (404, "no router for requested model")
            assert (await finished(proxy, kept))["status"] == "succeeded"
            assert not upstream.of_model("tts-old")
            await proxy.drained(upstream)


async def test_a_class_that_only_the_listing_gave_is_remembered(tmp_path: Path) -> None:
    """A restored job is queued before llama-swap has been asked again; it must not be taken for a chat."""
    voice = {"id": "anna", "architecture": {"output_modalities": ["audio"]}, "meta": {"llamaswap": {"type": "model"}}}
    async with Upstream() as upstream:
        upstream.by_model = {"chat-a": hang()}
        async with InProcess(upstream.url, data_dir=tmp_path, shutdown_grace=GRACE) as proxy:
            proxy.app._knowledge.take_listing({"data": [voice]})
            async with RawClient(proxy.port) as client:
                client.chat()
                await proxy.until(lambda: len(proxy.app.leases.lock.held) == 1)
                location = await submit(proxy, {"model": "anna", "messages": []}, "/v1/chat/completions")
                assert (await job_at(proxy, location))["class"] == "tts"
                proxy.signal()
                await proxy.ended()
        upstream.by_model = {}
        async with InProcess(upstream.url, data_dir=tmp_path) as proxy:
            assert (await finished(proxy, location))["status"] == "succeeded"
            assert (await result(proxy, location)).headers["x-lease-class"] == "tts"
            plain = await proxy.client.post("/v1/chat/completions", json={"model": "anna"})
            assert plain.headers["x-lease-class"] == "llm", "what comes now is judged by what is known now"


async def test_bodies_that_belong_to_no_job_are_removed(tmp_path: Path) -> None:
    async with Upstream(echo()) as upstream:
        async with Proxy(upstream.url, data_dir=str(tmp_path)) as proxy:
            location = await submit(proxy)
            await finished(proxy, location)
            assert modes(tmp_path / "jobs") == {"d700", "-600"}
        for name in ("left.request", "left.result"):
            (tmp_path / "jobs" / name).write_bytes(b"x")
        await until_files(tmp_path, {"1 .request", "2 .result"})
        async with Proxy(upstream.url, data_dir=str(tmp_path)) as proxy:
            await until_files(tmp_path, {"1 .result"})
            assert (await result(proxy, location)).content == b"audio of x"


# --- a folder that cannot be used


def start(data_dir: Path) -> tuple[int, str]:
    """What a proxy that should refuse to start says: exit code and standard error."""
    env = {"GPU_LEASE_UPSTREAM_URL": "http://127.0.0.1:9", "GPU_LEASE_LISTEN_PORT": "0"}
    env["GPU_LEASE_DATA_DIR"] = str(data_dir)
    command = [sys.executable, "-m", "proxy", "serve"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=False)
    lines = [line for line in done.stderr.splitlines() if "names_from" not in line]
    return done.returncode, "\n".join(lines)


async def test_two_proxies_do_not_share_a_folder(tmp_path: Path) -> None:
    async with Upstream(echo()) as upstream, Proxy(upstream.url, data_dir=str(tmp_path)) as proxy:
        code, text = await asyncio.to_thread(start, tmp_path)
        assert code == 2
        assert text.splitlines() == [f"gpu-lease-proxy: data_dir: another proxy runs on {tmp_path}; each needs its own"]
        assert (await finished(proxy, await submit(proxy)))["status"] == "succeeded"
        proxy.signal(signal.SIGKILL)
        await proxy.exit_code()
        async with Proxy(upstream.url, data_dir=str(tmp_path)) as after_it:
            await after_it.drained(upstream)


async def test_what_a_newer_proxy_wrote_is_not_touched(tmp_path: Path) -> None:
    async with Upstream(echo()) as upstream, Proxy(upstream.url, data_dir=str(tmp_path)) as proxy:
        await finished(proxy, await submit(proxy))
    table = tmp_path / "jobs" / "jobs.sqlite3"
    with contextlib.closing(sqlite3.connect(table)) as connection:
        connection.execute("PRAGMA user_version = 2")
    before = table.read_bytes()
    code, text = await asyncio.to_thread(start, tmp_path)
    assert code == 2
    assert len(text.splitlines()) == 1
    assert f"{table} was written by a newer proxy (version 2; this one knows 1)" in text
    assert table.read_bytes() == before


@pytest.mark.parametrize("damage", ["head", "middle", "other"])
async def test_a_damaged_table_is_refused(damage: str, tmp_path: Path) -> None:
    async with Upstream(echo()) as upstream, Proxy(upstream.url, data_dir=str(tmp_path)) as proxy:
        for _ in range(20):
            await finished(proxy, await submit(proxy, speech("x" * 100), **{"x-long": "y" * 2000}))
    table = tmp_path / "jobs" / "jobs.sqlite3"
    if damage == "other":
        table.unlink()
        with contextlib.closing(sqlite3.connect(table)) as connection:
            connection.execute("CREATE TABLE jobs (x)")
    else:
        data = bytearray(table.read_bytes())
        at = {"head": 0, "middle": 4096}[damage]
        data[at : at + 200] = b"\xff" * 200
        table.write_bytes(data)
    code, text = await asyncio.to_thread(start, tmp_path)
    assert (code, len(text.splitlines())) == (2, 1)
    assert f"{table} is no usable table of jobs" in text


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    code, text = start(tmp_path / "missing")
    assert (code, len(text.splitlines())) == (2, 1)
    assert "data_dir" in text
