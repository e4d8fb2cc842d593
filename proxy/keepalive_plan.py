"""Who is kept alive while it waits, when, and with what: pure.

Clients were measured: comments keep every reader of event streams alive, and spaces every parser of JSON; nothing else
does no harm anywhere. Sounds and pictures wait in silence, and so does whoever has not said what it waits for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from proxy.error_event import error_event, refused
from proxy.errors import Refusal
from proxy.inbound import RawHeaders
from proxy.routes import NameIn, Route

EVENT_STREAM, JSON = b"text/event-stream", b"application/json"

QUEUED = b": queued\n\n"


@dataclass(frozen=True, slots=True)
class Waiting:
    """What there is to tell of the request while it waits; `place` is 1 for the next, None once it is granted."""

    class_name: str
    model: str
    waited: Callable[[], float]
    place: Callable[[], int | None]


@dataclass(frozen=True, slots=True)
class Plan:
    """When and how one request is kept alive. `api` is that of a stream, None for plain JSON; times are seconds."""

    api: str | None
    after: float
    every: float
    shows_position: bool = False

    @property
    def content_type(self) -> bytes:
        """What the answer has to be."""
        return JSON if self.api is None else EVENT_STREAM

    def head(self) -> RawHeaders:
        """The fields of a head that is sent early; no proxy in between may hold back what follows."""
        return [(b"content-type", self.content_type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

    @property
    def sign(self) -> bytes:
        """What every reader of such an answer skips."""
        return b" " if self.api is None else QUEUED

    def silent_for(self, seconds: float | None) -> Plan:
        """The same, with nothing sent before that time: until then the client wants to hear a true status."""
        return replace(self, after=max(self.after, seconds or 0.0))

    def failure(self, error: Refusal) -> bytes:
        """What is sent for `error` once our head is out."""
        return b"" if self.api is None else error_event(self.api, refused(error))


@dataclass(frozen=True, slots=True)
class KeepAlives:
    """What the settings say of keep-alives; seconds. `json_after` is None where plain JSON gets none."""

    after: float
    every: float
    json_after: float | None = None
    show_position: bool = False
    silent_classes: frozenset[str] = frozenset()

    def asks_about_stream(self, method: str, route: Route) -> bool:
        """Whether it matters to a request of this route that its body asks for a stream."""
        return method == "POST" and (route.api is not None or (self.json_after is not None and _answers_json(route)))

    def plan(self, method: str, route: Route, class_name: str, *, streamed: bool | None) -> Plan | None:
        """How a request is kept alive; None: it waits in silence. `streamed` is None where that is not known."""
        if class_name in self.silent_classes or method != "POST" or streamed is None:
            return None
        if streamed:
            chat = route.api == "chat/completions"
            return None if route.api is None else Plan(route.api, self.after, self.every, chat and self.show_position)
        if self.json_after is None or not (route.api is not None or _answers_json(route)):
            return None
        return Plan(None, self.json_after, self.every)


def _answers_json(route: Route) -> bool:
    """Whether a route's answers are JSON by all we know: it is not made for sounds or pictures."""
    return route.name_in is NameIn.BODY and route.class_hint is None


def position(waiting: Waiting, place: int) -> bytes:
    """A whole chunk, as client libraries check them, with the place as the model's thinking."""
    text = f"Waiting for the GPU: place {place} in the queue, class {waiting.class_name}.\n"
    choice = {"index": 0, "delta": {"role": "assistant", "reasoning_content": text}, "finish_reason": None}
    chunk = {
        "id": "chatcmpl-queued",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": waiting.model,
        "choices": [choice],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
