"""Jobs as clients see them: asked for with `Prefer: respond-async`, watched, fetched, expired, and whose they are."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO, Any

import pytest
from jobs_support import (
    ASYNC,
    SPEECH,
    echo,
    events,
    finished,
    job_at,
    modes,
    result,
    said,
    speech,
    submit,
    until,
    until_files,
    until_gone,
)

from harness import (
    CHAT,
    EMBED,
    SSE,
    TTS,
    InProcess,
    Proxy,
    RawClient,
    Upstream,
    after,
    answer,
    chunk,
    event,
    hang,
    head,
    raw,
)
from proxy import exchange

CHAT_PATH = "/v1/chat/completions"


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    async with Upstream(echo()) as upstream:
        yield upstream


@pytest.fixture
async def proxy(upstream: Upstream) -> AsyncIterator[Proxy]:
    """Without a data_dir; drained after each test."""
    async with Proxy(upstream.url, keepalive_every=0.05) as proxy:
        yield proxy
        await proxy.drained(upstream)


# --- from the request to the result


async def test_a_job_is_accepted_waits_runs_and_is_fetched(proxy: Proxy, upstream: Upstream) -> None:
    end = asyncio.Event()
    upstream.by_model = {"chat-a": after(end)}
    async with RawClient(proxy.port) as client:
        client.chat()
        await proxy.until(holders=1)
        accepted = await proxy.client.post(SPEECH, json=speech("one"), headers=ASYNC)
        second = await submit(proxy, speech("two"))
        assert accepted.status_code == 202
        assert accepted.headers["preference-applied"] == "respond-async"
        location, job = accepted.headers["location"], accepted.json()
        assert location == f"/-/jobs/{job['id']}"
        assert re.fullmatch(r"[A-Za-z0-9_-]{22}", job["id"]), "128 bits"
        assert (job["status"], job["position"], job["class"], job["model"]) == ("queued", 1, "tts", "tts-a")
        assert job["queued_at"] > 1e9
        assert (job["started_at"], job["finished_at"], job["wait_seconds"], job["error"]) == (None,) * 4
        assert (await job_at(proxy, second))["position"] == 2
        early = await result(proxy, location)
        assert (early.status_code, early.json()["error"]["code"]) == (409, "job_unfinished")
        queue = await proxy.queue()
        assert [(waiter["id"], waiter["class"]) for waiter in queue["waiters"]] == [(2, "tts"), (3, "tts")]
        assert said(upstream.seen) == [], "nothing is sent before the lease is held"
        end.set()
        assert (await client.answer()).status == 200
    done = await finished(proxy, location)
    assert (done["status"], done["position"], done["error"]) == ("succeeded", None, None)
    assert job["queued_at"] == done["queued_at"] <= done["started_at"] <= done["finished_at"]
    assert done["wait_seconds"] == pytest.approx(done["started_at"] - done["queued_at"], abs=0.1)
    fetched = await result(proxy, location)
    assert (fetched.status_code, fetched.content) == (200, b"audio of one")
    assert fetched.headers["x-lease-class"] == "tts"
    assert (await result(proxy, location)).content == fetched.content, "as often as one likes"
    await finished(proxy, second)
    assert said(upstream.seen) == ["one", "two"]


async def test_a_job_is_on_disk_as_running_before_the_first_byte_upstream(upstream: Upstream, tmp_path: Path) -> None:
    """And it is on disk as queued before it is accepted; the result is whole before it has succeeded."""
    states: list[str] = []
    async with InProcess(upstream.url, data_dir=tmp_path) as proxy:
        table = proxy.app._jobs.store.table
        begin, end = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        original = table.begin

        def slow_begin(job: Any) -> None:
            asyncio.run_coroutine_threadsafe(begin.wait(), loop).result()
            original(job)

        table.begin = slow_begin  # type: ignore[method-assign]
        upstream.script = after(end, echo())
        location = await submit(proxy)
        assert [job.state for job in table.all()] == ["queued"]
        await proxy.until(lambda: len(proxy.app.leases.lock.held) == 1)
        await asyncio.sleep(0.1)  # nothing tells that a request is not being sent
        assert upstream.seen == []
        assert (await job_at(proxy, location))["status"] == "queued", "not even told before it is written"
        begin.set()
        await upstream.wait_for(bool)
        states += [job.state for job in table.all()]
        assert states == ["running"]
        assert (await job_at(proxy, location))["status"] == "running"
        end.set()
        await finished(proxy, location)
        await proxy.idle()


@pytest.mark.parametrize("size", [0, 1, 300_000, 3_000_000])
async def test_the_result_is_the_answer_byte_for_byte(proxy: Proxy, upstream: Upstream, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    fields = ("Content-Type: audio/wav", f"Content-Length: {size}", "Set-Cookie: a=1", "Set-Cookie: b=2", "X-Own: y")
    upstream.script = raw(head("206 Partial Content", *fields) + body, close=False)
    location = await submit(proxy)
    assert (await finished(proxy, location))["status"] == "succeeded"
    fetched = await result(proxy, location)
    assert (fetched.status_code, fetched.content) == (206, body)
    assert fetched.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert (fetched.headers["x-own"], fetched.headers["content-type"]) == ("y", "audio/wav")
    assert fetched.headers["content-length"] == str(size)


async def test_a_stream_is_kept_as_it_came(proxy: Proxy, upstream: Upstream) -> None:
    whole = event(0) + event(1) + b"data: [DONE]\n\n"
    upstream.script = raw(SSE + chunk(whole[:50]) + chunk(whole[50:]) + b"0\r\n\r\n", close=False)
    location = await submit(proxy, CHAT, CHAT_PATH)
    assert (await finished(proxy, location))["status"] == "succeeded"
    fetched = await result(proxy, location)
    assert fetched.content == whole
    assert fetched.headers["content-type"] == "text/event-stream"


@pytest.mark.parametrize("size", [10, 5_000_000])
async def test_any_leased_post_can_be_a_job(proxy: Proxy, upstream: Upstream, size: int) -> None:
    """Multipart, in memory and from a file; another method only passes."""
    upstream.script = answer()
    recording = {"file": ("a.wav", b"\x00\xff" * (size // 2))}
    form = {"model": "whisper-1", "language": "de"}
    response = await proxy.client.post("/v1/audio/transcriptions", data=form, files=recording, headers=ASYNC)
    location = response.headers["location"]
    assert (await finished(proxy, location))["class"] == "stt"
    (seen,) = upstream.seen
    assert recording["file"][1] in seen.body
    assert dict(seen.headers)[b"content-type"].startswith(b"multipart/form-data; boundary=")
    embedded = await submit(proxy, EMBED, "/v1/embeddings")
    under = await submit(proxy, {"x": 1}, "/upstream/chat-a/v1/chat/completions?a=%2F")
    for one in (embedded, under):
        assert (await finished(proxy, one))["status"] == "succeeded"
    assert upstream.seen[-1].target == b"/upstream/chat-a/v1/chat/completions?a=%2F"
    passed = await proxy.client.get("/v1/audio/voices?model=tts-a", headers=ASYNC)
    assert passed.status_code == 200
    assert "preference-applied" not in passed.headers
    unleased = await proxy.client.post("/v1/nothing", json={}, headers=ASYNC)
    assert unleased.status_code == 200


async def test_all_fields_but_the_preference_and_the_credential_go_upstream(proxy: Proxy, upstream: Upstream) -> None:
    fields = {"authorization": "Bearer sk-secret", "x-api-key": "sk-other", "prefer": "wait=9, respond-async"}
    kept = {"cookie": "a=b", "x-own": "1", "accept": "audio/wav", "user-agent": "me/1", "x-forwarded-for": "10.1.2.3"}
    location = await submit(proxy, **fields, **kept)
    await finished(proxy, location)
    sent = [(name.lower(), value) for name, value in upstream.seen[0].headers]
    names = {name for name, _ in sent}
    assert not names & {b"authorization", b"x-api-key", b"prefer"}
    for name, value in kept.items():
        wanted = f"{value}, 127.0.0.1" if name == "x-forwarded-for" else value
        assert dict(sent)[name.encode()] == wanted.encode()


# --- what goes wrong


async def test_an_answer_of_400_or_more_fails_the_job_and_is_replayed(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = answer(b'{"detail":"no such voice"}', "422 Unprocessable Entity", "X-Why: voice")
    location = await submit(proxy)
    job = await finished(proxy, location)
    assert (job["status"], job["error"]["code"]) == ("failed", "upstream_error")
    assert "422" in job["error"]["message"]
    fetched = await result(proxy, location)
    assert (fetched.status_code, fetched.json()) == (422, {"detail": "no such voice"})
    assert fetched.headers["x-why"] == "voice"


async def test_an_answer_that_breaks_off_fails_the_job(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = raw(head("200 OK", "Content-Length: 1000") + b"half")
    location = await submit(proxy)
    job = await finished(proxy, location)
    assert (job["status"], job["error"]["code"]) == ("failed", "upstream_failed")
    fetched = await result(proxy, location)
    assert (fetched.status_code, fetched.json()["error"]["code"]) == (502, "upstream_failed")


async def test_a_chat_stream_without_its_last_event_fails_the_job(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = raw(SSE + chunk(event(0)) + b"0\r\n\r\n", close=False)
    location = await submit(proxy, CHAT, CHAT_PATH)
    assert (await finished(proxy, location))["status"] == "failed"
    assert await proxy.metric('gpu_lease_incomplete_streams_total{class="llm"}') == 1


async def test_a_job_whose_turn_does_not_come_fails_as_its_request_would(upstream: Upstream) -> None:
    """In the shape of its own API, too."""
    end = asyncio.Event()
    upstream.by_model = {"tts-a": after(end)}
    async with Proxy(upstream.url, max_wait=0.3) as proxy, RawClient(proxy.port) as client:
        client.tts()
        await proxy.until(holders=1)
        location = await submit(proxy, CHAT, "/v1/messages")
        job = await finished(proxy, location)
        assert (job["status"], job["error"]["code"], job["started_at"]) == ("failed", "queue_timeout", None)
        fetched = await result(proxy, location)
        assert fetched.status_code == 503
        assert fetched.json()["type"] == "error"
        assert fetched.json()["error"]["code"] == "queue_timeout"
        assert "retry-after" not in fetched.headers, "it is final"
        end.set()
        await client.answer()
        assert len(upstream.seen) == 1
        await proxy.drained(upstream)


async def test_a_job_tries_again_while_connections_are_refused(
    upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with InProcess(upstream.url) as proxy:
        await finished(proxy, await submit(proxy))
        await proxy.until(lambda: proxy.app._health.fresh)
        await upstream.stop()
        with monkeypatch.context() as impatient:
            impatient.setattr(exchange, "RETRY_SECONDS", 0.2)
            hopeless = await submit(proxy)
            assert (await finished(proxy, hopeless))["error"]["code"] == "upstream_unreachable"
            assert (await result(proxy, hopeless)).status_code == 502
        patient = await submit(proxy, speech("again"))
        await until(proxy, patient, "running")
        await upstream.restart()
        assert (await finished(proxy, patient))["status"] == "succeeded"
        assert said(upstream.seen) == ["x", "again"]
        await proxy.idle()


async def test_what_the_queue_refuses_is_no_job(upstream: Upstream, tmp_path: Path) -> None:
    end = asyncio.Event()
    upstream.by_model = {"tts-a": after(end)}
    async with Proxy(upstream.url, max_queue=2, data_dir=str(tmp_path)) as proxy, RawClient(proxy.port) as client:
        client.tts()
        await proxy.until(holders=1)
        replies = await asyncio.gather(*(proxy.client.post(SPEECH, json=TTS, headers=ASYNC) for _ in range(8)))
        assert sorted(reply.status_code for reply in replies) == [202] * 2 + [503] * 6
        assert {reply.json()["error"]["code"] for reply in replies if reply.status_code == 503} == {"queue_full"}
        assert len((await proxy.queue())["waiters"]) == 2
        assert await proxy.metric('gpu_lease_requests_total{class="tts",code="202",model="other"}') == 2
        end.set()
        for reply in replies:
            if reply.status_code == 202:
                await finished(proxy, reply.headers["location"])
        await proxy.drained(upstream)
        await until_files(tmp_path, {"2 .result"})


async def test_an_unknown_page_or_job_is_a_404(proxy: Proxy) -> None:
    for path, code in (("", "page_not_found"), ("x", "job_not_found"), ("x/result", "job_not_found")):
        response = await proxy.client.get(f"/-/jobs/{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, code)
    assert (await proxy.client.delete("/-/jobs/x")).json()["error"]["code"] == "job_not_found"
    assert (await proxy.client.get("/-/jobs/x/events")).json()["error"]["code"] == "job_not_found"
    assert (await proxy.client.get("/-/jobs/x/other")).json()["error"]["code"] == "page_not_found"
    assert await proxy.metric('gpu_lease_rejected_total{reason="job_not_found"}') == 4


# --- the events


async def test_the_events_are_the_transitions_and_end_with_the_last(proxy: Proxy, upstream: Upstream) -> None:
    first, then = asyncio.Event(), asyncio.Event()
    upstream.by_model = {"chat-a": after(first), "tts-a": after(then, echo())}
    async with RawClient(proxy.port) as client:
        client.chat()
        await proxy.until(holders=1)
        location = await submit(proxy)
        async with proxy.client.stream("GET", f"{location}/events") as stream:
            assert stream.headers["content-type"] == "text/event-stream"
            assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
            text = ""
            async for piece in stream.aiter_text():
                text += piece
                if text.count(": queued\n\n") == 2:
                    first.set()
                if text.count(": running\n\n") == 2:
                    then.set()
    found = events(text)
    assert [name for name, _ in found] == ["queued", "running", "succeeded"]
    assert [job["status"] for _, job in found] == ["queued", "running", "succeeded"]
    assert [job["position"] for _, job in found] == [1, None, None]
    assert found[1][1]["started_at"] == found[2][1]["started_at"] is not None
    late = await proxy.client.get(f"{location}/events")
    assert [(name, job["status"]) for name, job in events(late.text)] == [
        ("queued", "queued"),
        ("running", "running"),
        ("succeeded", "succeeded"),
    ]


async def test_whoever_stops_watching_changes_nothing(proxy: Proxy, upstream: Upstream) -> None:
    end = asyncio.Event()
    upstream.by_model = {"tts-a": after(end, echo())}
    location = await submit(proxy)
    async with RawClient(proxy.port) as client:
        client.send(f"GET {location}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await client.until(b"event: running")
        client.reset()
    end.set()
    assert (await finished(proxy, location))["status"] == "succeeded"


# --- whose it is


async def test_only_the_key_that_made_a_job_sees_it(upstream: Upstream, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"api_keys": "sk-anna,sk-ben", "upstream_api_key": "sk-up", "data_dir": str(tmp_path)}
    anna: dict[str, Any] = {"authorization": "Bearer sk-anna"}
    ben = {"authorization": "Bearer sk-ben"}
    basic = {"authorization": "Basic " + base64.b64encode(b"user:sk-anna").decode()}
    async with Proxy(upstream.url, **keys) as proxy:
        location = await submit(proxy, **basic)
        assert (await finished(proxy, location, **anna))["status"] == "succeeded"
        assert (await result(proxy, location, **{"x-api-key": "sk-anna"})).status_code == 200
        for path in (location, f"{location}/result", f"{location}/events"):
            assert (await proxy.client.get(path)).status_code == 401
            hidden = await proxy.client.get(path, headers=ben)
            assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "job_not_found")
        assert (await proxy.client.delete(location, headers=ben)).status_code == 404
    sent = [(name.lower(), value) for name, value in upstream.seen[0].headers]
    assert [value for name, value in sent if name in {b"authorization", b"x-api-key"}] == [b"Bearer sk-up"]
    async with Proxy(upstream.url, **keys) as proxy:
        assert (await job_at(proxy, location, **anna))["status"] == "succeeded", "after a restart, too"
        assert (await proxy.client.get(location, headers=ben)).status_code == 404
    disk = b"".join(path.read_bytes() for path in (tmp_path / "jobs").iterdir())
    digest = hashlib.sha256(b"sk-anna")
    for trace in (b"sk-anna", b"sk-up", digest.digest()[:8], digest.hexdigest()[:16].encode()):
        assert trace not in disk


async def test_an_id_is_in_no_queue_no_metric_and_no_log(upstream: Upstream, tmp_path: Path) -> None:
    end = asyncio.Event()
    upstream.by_model = {"tts-a": after(end, raw(head("200 OK", "Content-Length: 9") + b"half"))}
    async with Proxy(upstream.url, data_dir=str(tmp_path), slow_wait_log=0) as proxy:
        ids = [(await submit(proxy)).rsplit("/", 1)[1] for _ in range(3)]
        seen = (await proxy.client.get("/-/queue")).text
        await proxy.client.delete(f"/-/jobs/{ids[2]}")
        end.set()
        for each in ids:
            await finished(proxy, f"/-/jobs/{each}")
        seen += (await proxy.client.get("/-/metrics")).text
    assert len(proxy.lines) > 2
    assert not [each for each in ids if each in seen + "".join(proxy.lines)]


# --- room


async def test_finished_jobs_expire(upstream: Upstream, tmp_path: Path) -> None:
    end = asyncio.Event()
    upstream.by_model = {"chat-a": after(end)}
    async with Proxy(upstream.url, job_ttl=0.5, data_dir=str(tmp_path)) as proxy, RawClient(proxy.port) as client:
        location = await submit(proxy)
        await finished(proxy, location)
        client.chat()
        await proxy.until(holders=1)
        waiting = await submit(proxy, speech("late"))
        await until_gone(proxy, location)
        assert (await job_at(proxy, waiting))["status"] == "queued", "only what has finished"
        end.set()
        await client.answer()
        await until(proxy, waiting, "succeeded")
        await until_files(tmp_path, set())
        await proxy.drained(upstream)
    async with Proxy(upstream.url, data_dir=str(tmp_path)) as proxy:
        assert (await proxy.client.get(location)).status_code == 404


async def test_the_oldest_finished_jobs_go_when_there_is_no_room(upstream: Upstream) -> None:
    upstream.script = answer(b"x" * 20_000)
    async with Proxy(upstream.url, jobs_max_bytes=50_000) as proxy:
        locations = [await submit(proxy) for _ in range(3)]
        third = await finished(proxy, locations[2])
        assert third["status"] == "succeeded"
        codes = [(await proxy.client.get(location)).status_code for location in locations]
        assert codes == [404, 200, 200]
        assert len((await result(proxy, locations[1])).content) == 20_000
        await proxy.drained(upstream)


async def test_when_nothing_has_finished_a_new_job_is_refused(upstream: Upstream) -> None:
    end = asyncio.Event()
    upstream.by_model = {"chat-a": after(end)}
    large = speech("x" * 20_000)
    async with Proxy(upstream.url, jobs_max_bytes=50_000) as proxy, RawClient(proxy.port) as client:
        client.chat()
        await proxy.until(holders=1)
        locations = [await submit(proxy, large) for _ in range(2)]
        refused = await proxy.client.post(SPEECH, json=large, headers=ASYNC)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "jobs_full")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        plain = await proxy.client.post("/v1/embeddings", json=EMBED)
        assert plain.status_code == 200, "only jobs are"
        upstream.script = answer()
        end.set()
        await client.answer()
        for location in locations:
            assert (await finished(proxy, location))["status"] == "succeeded"
        await finished(proxy, await submit(proxy, large))
        await proxy.drained(upstream)


@pytest.mark.parametrize("policy", ["cancel", "drain"])
async def test_a_result_that_is_too_large_fails_the_job_and_frees_the_lease(upstream: Upstream, policy: str) -> None:
    """With `drain` the engine works on to its end all the same."""
    upstream.script = answer(b"x" * 3_000_000)
    classes = {"tts": {"on_disconnect": policy}}
    async with Proxy(upstream.url, jobs_max_bytes=100_000, classes=classes) as proxy:
        location = await submit(proxy)
        job = await finished(proxy, location)
        assert (job["status"], job["error"]["code"]) == ("failed", "jobs_full")
        assert (await result(proxy, location)).status_code == 503
        await proxy.until(holders=0)
        outcome = {"cancel": "cancelled", "drain": "ok"}[policy]
        assert await proxy.metric(f'gpu_lease_exchanges_total{{class="tts",outcome="{outcome}"}}') == 1
        assert (await finished(proxy, await submit(proxy, CHAT, CHAT_PATH)))["error"]["code"] == "jobs_full"
        await proxy.drained(upstream)


async def test_a_full_disk_refuses_a_job_and_leaves_nothing(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with InProcess(upstream.url, data_dir=tmp_path) as proxy:
        jobs = proxy.app._jobs

        def full(name: str) -> IO[bytes]:
            raise OSError(28, "No space left on device", name)

        monkeypatch.setattr(jobs.store.folder, "create", full)
        refused = await proxy.client.post(SPEECH, json=TTS, headers=ASYNC)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "jobs_full")
        assert "No space left" in refused.json()["error"]["message"]
        assert (jobs.shelf.used, list(jobs.shelf)) == (0, [])
        monkeypatch.undo()
        location = await submit(proxy)
        await until(proxy, location, "succeeded")
        create = jobs.store.folder.create

        def full_for_results(name: str) -> IO[bytes]:
            return create(name) if name.endswith(".request") else full(name)

        monkeypatch.setattr(jobs.store.folder, "create", full_for_results)
        broken = await finished(proxy, await submit(proxy))
        assert broken["error"]["code"] == "jobs_full"
        assert "No space left" in broken["error"]["message"]
        await proxy.idle()


async def test_jobs_without_a_data_dir_leave_nothing_behind(upstream: Upstream, tmp_path: Path) -> None:
    async with Proxy(upstream.url, env={"TMPDIR": str(tmp_path)}) as proxy:
        assert os.listdir(tmp_path) == [], "nothing is made before the first job"
        location = await submit(proxy)
        await until(proxy, location, "succeeded")
        (folder,) = os.listdir(tmp_path)
        assert modes(tmp_path / folder) == {"d700", "-600"}
        await proxy.drained(upstream)
    assert os.listdir(tmp_path) == []


async def test_a_request_that_hangs_upstream_is_a_running_job_until_it_ends(proxy: Proxy, upstream: Upstream) -> None:
    upstream.script = hang(0.3, echo())
    location = await submit(proxy)
    await until(proxy, location, "running")
    queue = await proxy.until(waiters=0, holders=1)
    assert queue["holders"][0]["model"] == "tts-a"
    assert (await finished(proxy, location))["status"] == "succeeded"
