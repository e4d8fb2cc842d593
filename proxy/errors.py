"""Every error the proxy can give, and how it looks on the wire.

    ProxyError
    ├── SettingsError              at start or reload: the configuration cannot be used
    ├── ClientGone                 the client left; nobody is there to answer
    ├── CutStream                  the head is out and the rest cannot be true: cut the connection
    └── Refusal                    answered with `status` and an error object whose `code` is
        ├── BadTarget         400  bad_target
        ├── AmbiguousHeader   400  ambiguous_header
        ├── ModelUndecidable  400  model_undecidable
        ├── ActionMalformed   400  bad_action
        ├── Unauthorized      401  invalid_api_key
        ├── ActionForbidden   403  action_forbidden
        ├── PageNotFound      404  page_not_found
        ├── WaiterNotFound    404  waiter_not_found
        ├── JobNotFound       404  job_not_found
        ├── JobUnfinished     409  job_unfinished
        ├── JobCancelled      410  job_cancelled
        ├── HeadTimeout       408  head_timeout
        ├── BodyTimeout       408  body_timeout
        ├── BodyTooLarge      413  body_too_large
        ├── HeadTooLarge      431  head_too_large
        ├── WebSocketRefused  501  websocket_unsupported
        ├── JobInterrupted    502  interrupted
        ├── UpstreamFailed    502  upstream_failed
        │   └── UpstreamUnreachable 502  upstream_unreachable
        ├── IncompleteStream  502  incomplete_stream
        ├── UpstreamTimeout   504  upstream_timeout
        ├── Cancelled         503  cancelled
        ├── LlamaSwapRefusal       llama-swap's own answer, given before a request is read or queued in vain
        │   ├── UnknownModel  404  not_found
        │   └── KeyMissing    401  unauthorized
        └── Busy              503, with Retry-After
            ├── QueueFull          queue_full
            ├── ClientQueueFull    client_queue_full
            ├── QueueTimeout       queue_timeout
            ├── SpoolFull          spool_full
            ├── JobsFull           jobs_full
            └── Draining           draining

A refusal is an OpenAI error object; on `/v1/messages` it is Anthropic's envelope, since the SDKs of that API read
nothing else. `code` is part of the interface: the metric `gpu_lease_rejected_total{reason}` uses the same words.
"""

from __future__ import annotations

import html
import json
from typing import ClassVar

RETRY_AFTER_MAX = 60
"""Seconds. The SDKs honour Retry-After up to 60 s; some ignore a larger value altogether."""

NOT_TO_BE_SENT_AGAIN = frozenset({400, 401, 403, 404, 413, 431, 501})
"""Statuses of our own that the same request would get again. The SDKs send 501 again if nobody tells them."""

CHALLENGE = (b"www-authenticate", b'Basic realm="llama-swap"')
"""llama-swap's own challenge, so that browsers ask for the key."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "invalid_request_error",
    410: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


ANTHROPIC_TYPES = frozenset({*_ANTHROPIC_TYPES.values(), "api_error"})
"""All the words that API has for the kind of an error."""


def anthropic_type(status: int) -> str:
    """What Anthropic's API calls an error of this status."""
    return _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


class ProxyError(Exception):
    """Root of all errors of this package."""


class SettingsError(ProxyError):
    """The configuration cannot be used. `problems` holds one sentence per mistake, each naming what to change."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class ClientGone(ProxyError):
    """The client closed its connection before it had its whole answer."""


class CutStream(ProxyError):
    """Raised out of the application to make the server end the connection without the final chunk."""


class Refusal(ProxyError):
    """An answer of our own with a status of 400 or above; raised anywhere before the response head is out."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    default_message: ClassVar[str] = "The proxy failed to handle this request; its log says why."

    def __init__(self, message: str | None = None, *, retry_after: float | None = None) -> None:
        self.message = message or self.default_message
        self.retry_after = retry_after
        super().__init__(self.message)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Fields that belong to this error beside Content-Type and Content-Length."""
        if self.retry_after is not None:
            seconds = min(max(1, round(self.retry_after)), RETRY_AFTER_MAX)
            return [(b"retry-after", str(seconds).encode())]
        return [(b"x-should-retry", b"false")] if self.status in NOT_TO_BE_SENT_AGAIN else []

    def render(self, *, anthropic: bool, accept: bytes) -> tuple[bytes, bytes]:
        """(Content-Type, body) for a client that sent this Accept field."""
        return b"application/json", self.body(anthropic=anthropic)

    def body(self, *, anthropic: bool = False) -> bytes:
        """The error object as JSON, in OpenAI's shape or in Anthropic's."""
        if anthropic:
            inner = {"type": anthropic_type(self.status), "message": self.message, "code": self.code}
            return json.dumps({"type": "error", "error": inner}).encode()
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        return json.dumps({"error": error}).encode()


class BadTarget(Refusal):
    """The request target is one that the proxy and llama-swap could read differently."""

    status, code, type = 400, "bad_target", "invalid_request_error"
    default_message = "The request target must be a path that starts with one slash."


class AmbiguousHeader(Refusal):
    """A field that decides the route, the body or the key came twice with different values."""

    status, code, type = 400, "ambiguous_header", "invalid_request_error"
    default_message = "A header field was sent twice with different values; send it once."


class ModelUndecidable(Refusal):
    """No model name can be read from the request, or not with certainty the one that llama-swap would read."""

    status, code, type = 400, "model_undecidable", "invalid_request_error"
    default_message = "No model name could be read from this request; send exactly one."


class Unauthorized(Refusal):
    """Keys are configured and the request carries none of them. The challenge is llama-swap's own."""

    status, code, type = 401, "invalid_api_key", "authentication_error"
    default_message = "A valid API key is needed: send it as Authorization: Bearer, as Basic password or as x-api-key."

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The challenge that llama-swap sends, so that browsers ask for the key."""
        return [*super().headers(), CHALLENGE]


class ActionMalformed(Refusal):
    """What was posted to `/-/cancel` is not JSON of the right form."""

    status, code, type = 400, "bad_action", "invalid_request_error"
    default_message = 'Send {"id": NUMBER} with Content-Type: application/json; the numbers are those of /-/queue.'


class ActionForbidden(Refusal):
    """An action was asked for by somebody, or from a page, that may not."""

    status, code, type = 403, "action_forbidden", "permission_error"
    default_message = "Where no keys are set, actions are taken from this machine only (setting api_keys)."


class PageNotFound(Refusal):
    """A path under `/-/` that the proxy does not have."""

    status, code, type = 404, "page_not_found", "invalid_request_error"
    default_message = (
        "The proxy has no such page; it has /-/, /-/healthz, /-/readyz, /-/queue, /-/metrics and /-/jobs/ID."
    )


class WaiterNotFound(Refusal):
    """What should be cancelled does not wait, or no more."""

    status, code, type = 404, "waiter_not_found", "invalid_request_error"
    default_message = "No request with this number waits; it may have been granted, or have ended, a moment ago."


class JobNotFound(Refusal):
    """There is no such job, no more, or not for this key."""

    status, code, type = 404, "job_not_found", "invalid_request_error"
    default_message = "There is no such job: it never was, its time is over, or another key made it."


class JobUnfinished(Refusal):
    """The result of a job that has not finished was asked for."""

    status, code, type = 409, "job_unfinished", "invalid_request_error"
    default_message = "The job has not finished; its result is here once it has."


class JobCancelled(Refusal):
    """The result of a job that was cancelled was asked for."""

    status, code, type = 410, "job_cancelled", "invalid_request_error"
    default_message = "The job was cancelled; it has no result."


class BodyTooLarge(Refusal):
    """The request body is larger than `max_body`."""

    status, code, type = 413, "body_too_large", "invalid_request_error"
    default_message = "The request body is larger than this proxy takes (setting max_body)."


class HeadTimeout(Refusal):
    """The head of a request did not come whole within `head_timeout`."""

    status, code, type = 408, "head_timeout", "invalid_request_error"
    default_message = "The head of the request took too long (setting head_timeout)."


class BodyTimeout(Refusal):
    """Nothing of an unfinished request body came for `body_timeout`."""

    status, code, type = 408, "body_timeout", "invalid_request_error"
    default_message = "The body of the request stopped coming (setting body_timeout)."


class HeadTooLarge(Refusal):
    """The head of a request is larger than `max_head`."""

    status, code, type = 431, "head_too_large", "invalid_request_error"
    default_message = "The head of the request is larger than this proxy takes (setting max_head)."


class WebSocketRefused(Refusal):
    """A WebSocket handshake on a route where none is bridged."""

    status, code, type = 501, "websocket_unsupported", "invalid_request_error"
    default_message = "WebSockets are not forwarded by this proxy."


class JobInterrupted(Refusal):
    """The proxy ended while a job was running; it may have been sent, so it is not sent again."""

    status, code = 502, "interrupted"
    default_message = "The proxy ended while this job was running; it was not sent again."


class UpstreamFailed(Refusal):
    """llama-swap took the request, or part of it, and gave no usable response head."""

    status, code = 502, "upstream_failed"
    default_message = "llama-swap ended the connection without an answer; the request was not sent again."


class UpstreamUnreachable(UpstreamFailed):
    """No connection to llama-swap could be made; not one byte of the request was sent."""

    code = "upstream_unreachable"
    default_message = "llama-swap cannot be reached at upstream_url; nothing of the request was sent."


class IncompleteStream(Refusal):
    """A stream of events ended as if it were whole, without its last event."""

    status, code = 502, "incomplete_stream"
    default_message = "The answer is not whole: llama-swap ended the stream before its last event."


class UpstreamTimeout(Refusal):
    """The connection to llama-swap was not made within the connect timeout; not one byte was sent."""

    status, code = 504, "upstream_timeout"
    default_message = "Connecting to llama-swap took too long; nothing of the request was sent."


class Cancelled(Refusal):
    """Somebody took the waiting request out of the queue; it is not to come back by itself."""

    status, code = 503, "cancelled"
    default_message = "The request was cancelled while it waited for the GPU."

    def headers(self) -> list[tuple[bytes, bytes]]:
        """SDKs would send a 503 again."""
        return [(b"x-should-retry", b"false")]


class LlamaSwapRefusal(Refusal):
    """What llama-swap itself would answer, word for word, in the form that the client's Accept field asks for."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        """None but its own."""
        return []

    def render(self, *, anthropic: bool, accept: bytes) -> tuple[bytes, bytes]:
        """Plain text, HTML or JSON, in llama-swap's order of preference."""
        if b"text/plain" in accept:
            return b"text/plain", f"llama-swap: {self.message}".encode()
        if b"text/html" in accept:
            text = html.escape(self.message)
            return b"text/html", f"<html><body><h1>llama-swap</h1><p>{text}</p></body></html>".encode()
        error = {"message": self.message, "type": self.type, "param": None, "code": self.code}
        return b"application/json", json.dumps({"src": "llama-swap", "error": error}, separators=(",", ":")).encode()


class UnknownModel(LlamaSwapRefusal):
    """llama-swap's configuration has no such name; the request is neither queued nor forwarded."""

    status, code, type = 404, "not_found", "invalid_request_error"
    default_message = "no router for requested model"

    def __init__(self, message: str | None = None, *, upstream: bool = False) -> None:
        super().__init__("model not found" if upstream else message)


class KeyMissing(LlamaSwapRefusal):
    """llama-swap's configuration has `apiKeys` and the request has none of them."""

    status, code, type = 401, "unauthorized", "authentication_error"
    default_message = "unauthorized: invalid or missing API key"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """llama-swap's challenge."""
        return [*super().headers(), CHALLENGE]


class Busy(Refusal):
    """The proxy cannot take this request now; the same request may succeed after `Retry-After`."""

    status = 503

    def __init__(self, message: str | None = None, *, retry_after: float = 1) -> None:
        super().__init__(message, retry_after=retry_after)


class QueueFull(Busy):
    """`max_queue` requests are waiting already."""

    code = "queue_full"
    default_message = "The queue for the GPU is full (setting max_queue)."


class ClientQueueFull(Busy):
    """`max_queue_per_client` requests of this client are waiting already."""

    code = "client_queue_full"
    default_message = "This client has too many requests waiting for the GPU (setting max_queue_per_client)."


class QueueTimeout(Busy):
    """The request waited for `max_wait` and its turn did not come."""

    code = "queue_timeout"
    default_message = "The GPU was not free in time for this request (setting max_wait)."


class SpoolFull(Busy):
    """The bodies of waiting requests together would exceed `max_spool`."""

    code = "spool_full"
    default_message = "Too many large request bodies are waiting (setting max_spool)."


class JobsFull(Busy):
    """The requests and results of all jobs together would exceed `jobs_max_bytes`, or the disk is full."""

    code = "jobs_full"
    default_message = "There is no room for this job or its result (setting jobs_max_bytes)."


class Draining(Busy):
    """The proxy is shutting down and takes no new work for the GPU."""

    code = "draining"
    default_message = "The proxy is shutting down; try again in a moment."


def refusal_of(code: str, message: str | None) -> Refusal:
    """The refusal with this code; a plain one where none has it."""
    kinds: list[type[Refusal]] = [Refusal]
    for kind in kinds:
        if kind.code == code:
            return kind(message)
        kinds += kind.__subclasses__()
    return Refusal(message)
