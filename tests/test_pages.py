"""The proxy's own pages: what they say, to whom, and that nothing but them is under `/-/`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from harness import InProcess, Upstream, answer
from lease_support import CHAT
from proxy.errors import Refusal
from proxy.lease import Hold, Leases
from proxy.pages import make_pages
from proxy.router import ClassRouter
from proxy.rwlock import Policy
from proxy.tickets import Bounds, Terms


@dataclass
class Pages:
    """The pages, and what they look at."""

    leases: Leases = field(
        default_factory=lambda: Leases(ClassRouter(), lambda _: 10, Policy(), Bounds(10, 10, lambda _: 60.0))
    )
    fresh: bool = True
    refused: list[Refusal] = field(default_factory=list)

    async def get(self, path: str, method: str = "GET", **fields: str) -> httpx.Response:
        registry = CollectorRegistry()
        Counter("things", "Things.", registry=registry).inc()
        app = make_pages(self.leases, registry, lambda: self.fresh, self.refused.append)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            return await client.request(method, path, headers=fields)


@pytest.fixture
async def pages() -> Pages:
    return Pages()


async def test_healthz_says_that_the_process_is_alive_whatever_else_is(pages: Pages) -> None:
    pages.fresh = False
    pages.leases.drain()
    response = await pages.get("/-/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(("fresh", "draining"), [(True, False), (False, False), (True, True), (False, True)])
async def test_readyz_needs_an_upstream_and_no_end_in_sight(pages: Pages, fresh: bool, draining: bool) -> None:
    pages.fresh = fresh
    if draining:
        pages.leases.drain()
    response = await pages.get("/-/readyz")
    ready = fresh and not draining
    assert response.status_code == (200 if ready else 503)
    assert response.json() == {"ready": ready, "upstream": fresh, "draining": draining}


async def test_queue_is_json_and_idle_at_first(pages: Pages) -> None:
    response = await pages.get("/-/queue")
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "policy": "batch",
        "turn": None,
        "holders": [],
        "waiters": [],
        "kept": [],
        "finished": [],
        "load_seconds": {},
    }


async def test_queue_shows_what_clients_say_of_their_patience_and_the_places_of_those_that_left(pages: Pages) -> None:
    bounds = Bounds(10, 10, lambda _: 60.0, keep_place=60.0)
    pages.leases = Leases(ClassRouter(), lambda _: 1, Policy(), bounds)
    holds = [pages.leases.hold(CHAT, "", Terms(client_timeout=seconds)) for seconds in (1, None, 600)]
    holds.append(pages.leases.hold(CHAT, "", Terms(b"identity")))
    tasks = [asyncio.create_task(_run(hold)) for hold in holds]
    await asyncio.sleep(0)
    tasks[3].cancel()
    holds[3].left()
    shown = (await pages.get("/-/queue")).json()
    (place,) = shown["kept"]
    assert set(place) == {"class", "model", "mode", "waited_seconds", "seconds_left"}
    assert 59 < place["seconds_left"] <= 60
    assert [waiter.get("client_timeout_seconds") for waiter in shown["waiters"]] == [None, 600]
    assert "client_timeout_seconds" not in shown["waiters"][0]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _run(hold: Hold) -> None:
    async with hold:
        await asyncio.Event().wait()


async def test_metrics_are_plain_text_unless_open_metrics_are_asked_for(pages: Pages) -> None:
    plain = await pages.get("/-/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "things_total 1.0" in plain.text
    assert "# EOF" not in plain.text
    asked = await pages.get("/-/metrics", accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert asked.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert asked.text.endswith("# EOF\n")


@pytest.mark.parametrize("path", ["/-/", "/-/nothing", "/-/Queue", "/-/healthz/x", "/-//queue", "/-/queue%20"])
async def test_another_path_is_a_404_in_the_form_of_all_errors(pages: Pages, path: str) -> None:
    response = await pages.get(path)
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == "page_not_found"
    assert [refusal.code for refusal in pages.refused] == ["page_not_found"]


async def test_pages_are_read_only(pages: Pages) -> None:
    response = await pages.get("/-/queue", "POST")
    assert response.status_code == 405
    assert "GET" in response.headers["allow"]
    assert (await pages.get("/-/queue", "HEAD")).status_code == 200


# -- in the whole application


@pytest.fixture
async def keyed() -> AsyncIterator[InProcess]:
    async with Upstream(answer(b"llama-swap")) as upstream, InProcess(upstream.url, api_keys=["secret"]) as proxy:
        yield proxy


@pytest.mark.parametrize("path", ["/-/queue", "/-/metrics", "/-/nothing"])
async def test_pages_need_a_key_where_keys_are_set(keyed: InProcess, path: str) -> None:
    refused = await keyed.client.get(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert "www-authenticate" in refused.headers
    assert keyed.metric("gpu_lease_rejected_total", reason="invalid_api_key") == 1
    assert (await keyed.client.get(path, headers={"x-api-key": "secret"})).status_code != 401


@pytest.mark.parametrize("path", ["/-/healthz", "/-/readyz"])
async def test_probes_need_no_key(keyed: InProcess, path: str) -> None:
    assert (await keyed.client.get(path)).status_code in {200, 503}


async def test_readyz_is_503_until_the_upstream_has_answered_and_again_when_it_no_longer_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("proxy.health.INTERVAL", 0.01)
    monkeypatch.setattr("proxy.health.FRESH", 0.1)
    async with Upstream() as upstream:
        await upstream.stop()
        async with InProcess(upstream.url) as proxy:

            async def ready(status: int) -> dict[str, Any]:
                while (response := await proxy.client.get("/-/readyz")).status_code != status:
                    pass
                return dict(response.json())

            assert await ready(503) == {"ready": False, "upstream": False, "draining": False}
            assert proxy.metric("gpu_lease_upstream_up") == 0
            await upstream.restart()
            assert await ready(200) == {"ready": True, "upstream": True, "draining": False}
            assert proxy.metric("gpu_lease_upstream_up") == 1
            await upstream.stop()
            await ready(503)
            await proxy.until(lambda: proxy.metric("gpu_lease_upstream_up") == 0)
