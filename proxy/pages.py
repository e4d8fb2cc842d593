"""The proxy's own URLs, all under `/-/`, which llama-swap does not use. None of them ever waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxy.errors import PageNotFound, Refusal
from proxy.history import Finished
from proxy.lease import Leases
from proxy.views import HolderView, KeptView, TurnView, WaiterView

NAME_SHOWN = 200
"""Characters of a name: clients may send far longer ones."""


def make_pages(
    leases: Leases,
    registry: CollectorRegistry,
    upstream_fresh: Callable[[], bool],
    refused: Callable[[Refusal], None],
    *,
    load_seconds: Callable[[], dict[str, float]] = dict,
    finished: Iterable[Finished] = (),
    more: Iterable[Route] = (),
) -> Starlette:
    """The application that serves them, and `more`; `refused` counts what it refuses. Keys have been checked before.

    `finished` are the requests that have ended, the newest last.
    """

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        upstream, draining = upstream_fresh(), leases.draining
        ready = upstream and not draining
        return JSONResponse({"ready": ready, "upstream": upstream, "draining": draining}, 200 if ready else 503)

    async def queue(request: Request) -> Response:
        ended = [_finished(one) for one in reversed(list(finished))]
        return JSONResponse(queue_json(leases) | {"finished": ended, "load_seconds": load_seconds()})

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    async def refuse(request: Request, error: Exception) -> Response:
        refusal = error if isinstance(error, Refusal) else PageNotFound()
        refused(refusal)
        response = Response(refusal.body(), refusal.status, media_type="application/json")
        response.raw_headers += refusal.headers()
        return response

    routes = [
        Route("/-/healthz", healthz),
        Route("/-/readyz", readyz),
        Route("/-/queue", queue),
        Route("/-/metrics", metrics),
        *more,
    ]
    return Starlette(routes=routes, exception_handlers={404: refuse, Refusal: refuse})


def queue_json(leases: Leases) -> dict[str, Any]:
    """The snapshot as `/-/queue` gives it; seconds are rounded to milliseconds."""
    snapshot = leases.snapshot()
    return {
        "policy": snapshot.policy,
        "turn": _turn(snapshot.turn) if snapshot.turn else None,
        "holders": [_holder(holder) for holder in snapshot.holders],
        "waiters": [_waiter(waiter) for waiter in snapshot.waiters],
        "kept": [_kept(place) for place in snapshot.kept],
    }


def _turn(turn: TurnView) -> dict[str, Any]:
    return {
        "class": turn.class_name,
        "mode": turn.mode,
        "models": list(turn.models),
        "seconds": round(turn.seconds, 3),
    }


def _holder(view: HolderView) -> dict[str, Any]:
    return {"id": view.id, **_names(view), "held_seconds": round(view.held_seconds, 3), **_whose(view)}


def _waiter(view: WaiterView) -> dict[str, Any]:
    place = {"id": view.id, "position": view.position}
    shown = {**place, **_names(view), "waited_seconds": round(view.waited_seconds, 3), **_whose(view)}
    return shown if view.client_timeout is None else {**shown, "client_timeout_seconds": view.client_timeout}


def _kept(view: KeptView) -> dict[str, Any]:
    seconds = {"waited_seconds": round(view.waited_seconds, 3), "seconds_left": round(view.seconds_left, 3)}
    return {**_names(view), **seconds}


def _finished(one: Finished) -> dict[str, Any]:
    seconds = {
        "waited_seconds": round(one.waited, 3),
        "held_seconds": None if one.held is None else round(one.held, 3),
        "ended_at": round(one.at, 3),
    }
    names = {"id": one.id, "class": one.class_name, "model": one.model[:NAME_SHOWN]}
    return {**names, "outcome": one.outcome, **seconds, **_whose(one)}


def _whose(view: HolderView | WaiterView | Finished) -> dict[str, Any]:
    return {"client": view.client, "job": True} if view.is_job else {"client": view.client}


def _names(view: HolderView | WaiterView | KeptView) -> dict[str, Any]:
    names = {"class": view.class_name, "model": view.model[:NAME_SHOWN], "mode": view.mode}
    return names if view.requested == view.model else {**names, "requested": view.requested[:NAME_SHOWN]}
