"""llama-swap's route table, matched as its server matches: Go's `http.ServeMux`.

The path is cleaned as it was sent, escapes and all (`//` and `..` answer 307), and matched segment by segment
with each segment decoded: `/v1/%63hat/completions` is a route, `/v1%2Fchat/completions` is not. GET patterns
take HEAD too. A path that only other methods have answers 405.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from urllib.parse import unquote

BODY_ROUTES = (
    *(
        f"/v1/{name}"
        for name in (
            "chat/completions", "completions", "responses", "messages", "messages/count_tokens", "embeddings",
            "rerank", "reranking", "audio/speech", "audio/voices", "images/generations",
            "audio/transcriptions", "images/edits",
        )
    ),
    *("/rerank", "/reranking", "/infill", "/completion"),
    *("/sdapi/v1/txt2img", "/sdapi/v1/img2img", "/audioapi/v1/tasks/run"),
    *(
        f"/v/{name}"
        for name in (
            "chat/completions", "completions", "responses", "messages", "messages/count_tokens", "embeddings",
            "rerank", "reranking",
        )
    ),
)  # fmt: skip
QUERY_ROUTES = ("/v1/audio/voices", "/props", "/sdapi/v1/loras")

# (method or "" for any, pattern, name of the handler). A last segment `*` takes the rest of the path.
TABLE: tuple[tuple[str, str, str], ...] = (
    *(("POST", path, "named") for path in BODY_ROUTES),
    *(("GET", path, "named") for path in QUERY_ROUTES),
    ("GET", "/v1/models", "models"),
    ("GET", "/models", "models"),
    ("GET", "/logs", "logs"),
    ("GET", "/logs/stream", "log_stream"),
    ("GET", "/logs/stream/*", "log_stream"),
    ("GET", "/health", "health"),
    ("GET", "/wol-health", "health"),
    ("GET", "/", "root"),
    ("GET", "/ui/*", "ui"),
    ("GET", "/favicon.ico", "favicon"),
    ("GET", "/metrics", "metrics"),
    ("GET", "/unload", "unload"),
    ("GET", "/running", "running"),
    ("GET", "/upstream", "upstream_root"),
    ("", "/upstream/*", "upstream"),
    ("", "/comfyui", "comfyui_root"),
    ("", "/comfyui/*", "comfyui"),
    ("POST", "/api/models/unload", "unload_all"),
    ("POST", "/api/models/unload/*", "unload_model"),
    ("GET", "/api/profiles", "profiles"),
    ("PUT", "/api/profiles/active", "activate"),
    ("GET", "/api/events", "events"),
    ("GET", "/api/version", "version"),
    ("GET", "/_sim/log", "sim_log"),
    ("DELETE", "/_sim/log", "sim_reset"),
    ("GET", "/_sim/state", "sim_state"),
    ("POST", "/_sim/script", "sim_script"),
    ("POST", "/_sim/release", "sim_release"),
)

METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")  # that occur in the table

# No key is needed for these, nor for paths that are no route at all.
OURS = frozenset(handler for _, path, handler in TABLE if path.startswith("/_sim/"))
OPEN = OURS | {"health", "root", "favicon", "upstream_root"}
# Requests on these are the model requests that the journal records.
RECORDED = frozenset({"named", "upstream", "comfyui"})


@dataclass(frozen=True, slots=True)
class Found:
    handler: str
    rest: str = ""  # what `*` stood for, decoded


@dataclass(frozen=True, slots=True)
class Refused:
    status: int  # 307, 400, 404 or 405
    location: str = ""
    allow: str = ""


def match(method: str, raw_path: str) -> Found | Refused:
    if re.search(r"%(?![0-9A-Fa-f]{2})", raw_path):
        return Refused(400)
    path = clean(raw_path)
    found = _look_up(method, path)
    if found is None and not path.endswith("/") and _look_up(method, path + "/", exact=True):
        return Refused(307, location=path + "/")
    if path != raw_path:
        return Refused(307, location=path)
    if found is not None:
        return found
    allowed = [method for method in METHODS if _look_up(method, path) or _look_up(method, path + "/", exact=True)]
    return Refused(405, allow=", ".join(allowed)) if allowed else Refused(404)


def clean(path: str) -> str:
    """The path without empty, `.` and `..` segments; a slash at its end stays."""
    cleaned = "/" + posixpath.normpath("/" + path).lstrip("/")
    return cleaned + "/" if path.endswith("/") and cleaned != "/" else cleaned


def _look_up(method: str, path: str, *, exact: bool = False) -> Found | None:
    segments = [unquote(segment) for segment in path.split("/")[1:]]
    for wanted, pattern, handler in TABLE:
        if wanted and wanted != method and not (wanted == "GET" and method == "HEAD"):
            continue
        parts = pattern.split("/")[1:]
        if parts[-1] != "*":
            if parts == segments:
                return Found(handler)
        elif parts[:-1] == segments[: len(parts) - 1] and len(segments) >= len(parts):
            rest = segments[len(parts) - 1 :]
            if not exact or rest == [""]:
                return Found(handler, "/".join(rest))
    return None
