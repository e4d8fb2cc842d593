"""Routes: which requests can load a model, decided as llama-swap's router would, escapes and all.

The rows of the adversarial tables were compared with Go's own net/http.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from proxy.errors import BadTarget
from proxy.routes import NameIn, Route, match_route

CHAT = ["chat/completions", "completions", "responses", "messages", "messages/count_tokens"]
CHAT += ["embeddings", "rerank", "reranking"]
POST_ROUTES = {
    **{f"/{version}/{name}": None for version in ("v1", "v") for name in CHAT},
    **dict.fromkeys(["/rerank", "/reranking", "/infill", "/completion"]),
    "/v1/audio/speech": "tts",
    "/v1/audio/voices": "tts",
    "/audioapi/v1/tasks/run": "tts",
    "/v1/audio/transcriptions": "stt",
    "/v1/images/generations": "image",
    "/v1/images/edits": "image",
    "/sdapi/v1/txt2img": "image",
    "/sdapi/v1/img2img": "image",
}
QUERY_ROUTES = {"/v1/audio/voices": "tts", "/props": None, "/sdapi/v1/loras": "image"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "M-SEARCH")


def match(method: str, path: str) -> Route:
    return match_route(method, path.encode())


def lease(method: str, path: str) -> str:
    """The decision in one word: refused, none, where the name is, or the name that the path holds."""
    try:
        route = match(method, path)
    except BadTarget:
        return "refused"
    if route.name_in is NameIn.NOWHERE:
        return "none"
    return route.name_in.value if route.name is None else f"{route.name_in.value} {route.name}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", sorted({*POST_ROUTES, *QUERY_ROUTES}))
def test_model_routes_by_method(method: str, path: str) -> None:
    expected = "none"
    if method == "POST" and path in POST_ROUTES:
        expected = "body"
    elif method in {"GET", "HEAD"} and path in QUERY_ROUTES:
        expected = "query" if method == "GET" else "body"
    assert lease(method, path) == expected


@pytest.mark.parametrize(("path", "hint"), POST_ROUTES.items())
def test_speech_voice_transcription_and_image_routes_are_evidence_of_a_class(path: str, hint: str | None) -> None:
    assert match("POST", path).class_hint == hint
    assert match("POST", f"/upstream/unknown{path}").class_hint == hint


def test_no_route_is_evidence_for_a_class_that_does_not_wait() -> None:
    assert "embed" not in {*POST_ROUTES.values(), *QUERY_ROUTES.values()}


@pytest.mark.parametrize("method", METHODS)
def test_case_59_upstream_and_comfyui_load_for_any_method_but_options(method: str) -> None:
    found = [lease(method, path) for path in ("/upstream/tts-a/health", "/upstream/tts-a/", "/comfyui/")]
    loads = ["path tts-a", "path tts-a", "fixed comfyui_auto"]
    assert found == (["none"] * 3 if method == "OPTIONS" else loads)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/models", "/logs", "/logs/stream", "/logs/stream/x", "/health", "/wol-health", "/", "/ui/"),
        *("/ui/index.html", "/favicon.ico", "/metrics", "/running", "/unload", "/upstream", "/upstream/", "/comfyui"),
        *("/comfyui/x", "/api/events", "/api/models/unload/tts", "/-/queue", "/-/healthz", "/unknown", "/v1/tts"),
    ],
)
def test_case_59_routes_that_load_nothing_are_never_leased(method: str, path: str) -> None:
    assert lease(method, path) == "none"


@pytest.mark.parametrize("extension", ["js", "json", "css", "png", "gif", "jpg", "jpeg", "ico", "txt"])
def test_paths_that_llama_swap_ignores_below_upstream_are_not_leased(extension: str) -> None:
    assert lease("GET", f"/upstream/tts/a/b.{extension}") == "none"
    assert lease("GET", f"/upstream/tts/b.{extension}/") == "path tts"
    assert lease("GET", f"/upstream/tts/b.{extension.upper()}") == "path tts"
    assert lease("GET", f"/upstream/tts.{extension}/v1") == f"path tts.{extension}"


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        # percent-decoded before they are matched, segment by segment
        ("POST", "/v1/%63hat/completions", "body"),
        ("POST", "/%76%31/%63%68%61%74/completions", "body"),
        ("GET", "/%75pstream/%76is/x", "path vis"),
        ("GET", "/%63omfyui/", "fixed comfyui_auto"),
        ("GET", "/prop%73", "query"),
        ("POST", "/v1%2Fchat/completions", "none"),
        ("POST", "/v1/chat%2fcompletions", "none"),
        ("GET", "/upstream%2Ftts/x", "none"),
        ("GET", "/%2Fupstream/tts/x", "none"),
        # ids with slashes: only the settings can tell where they end, so the first part stands for them
        ("GET", "/upstream/author/model/x", "path author"),
        ("GET", "/upstream/author%2Fmodel/x", "path author"),
        ("GET", "/upstream/tts/workflows%2Fa%20b.json", "none"),
        ("GET", "/upstream/tts/workflows%2Fa%20b.json5", "path tts"),
        # an escaped slash is a slash below /upstream and /comfyui
        ("GET", "/upstream/tts%2F", "path tts"),
        ("GET", "/upstream/tts%2Fhealth", "path tts"),
        ("GET", "/upstream/%2Ftts/x", "path tts"),
        ("GET", "/upstream/%2F%2ftts%2F", "path tts"),
        ("GET", "/upstream/%2Ftts", "none"),
        ("GET", "/upstream/%2F", "none"),
        ("GET", "/comfyui/%2F", "fixed comfyui_auto"),
        ("GET", "/comfyui/%2F%2F", "none"),
        ("GET", "/comfyui%2F", "none"),
        # what is not canonical is redirected, and loads nothing
        ("POST", "//v1/chat/completions", "none"),
        ("POST", "/v1//chat/completions", "none"),
        ("POST", "/v1/./chat/completions", "none"),
        ("POST", "/x/../v1/chat/completions", "none"),
        ("GET", "/upstream//tts/x", "none"),
        ("GET", "/upstream/tts//v1/models", "none"),
        ("GET", "/upstream/tts/../x/", "none"),
        ("GET", "/upstream/tts/.", "none"),
        ("GET", "/comfyui//", "none"),
        ("GET", "/./comfyui/", "none"),
        # but escaped dots are part of a name, not of the way
        ("GET", "/upstream/tts/%2e%2e/x", "path tts"),
        ("GET", "/upstream/%2e%2e/v1/chat", "path .."),
        ("POST", "/v1/%2e/chat/completions", "none"),
        ("GET", "/comfyui/%2e", "none"),
        # a byte that a path cannot hold raw: the whole path is decoded first, slashes and dots too
        ("GET", '/upstream%2Ftts/x"', "path tts"),
        ("GET", "/%75pstream%2ftts%2F|", "path tts"),
        ("GET", "/upstream/tts/#/x", "path tts"),
        ("GET", "/upstream/tts%2F%2Fx{", "none"),
        ("GET", '/upstream/x/%2e%2e/tts/"', "none"),
        ("GET", "/upstream/tts/%2E^", "path tts"),
        ("POST", "/v1%2Fchat%2Fcompletions\\", "none"),
        ("POST", "/v1/chat/completions#x", "none"),
        ("GET", "/upstream/a\\b/x", "path a\\b"),
        # other separators are none
        ("POST", "/v1/chat/completions;x", "none"),
        ("POST", "/v1/chat/completions;/x", "none"),
        ("POST", "/v1/chat/completions%3Fx", "none"),
        ("POST", "/v1/chat/completions%00", "none"),
        ("POST", "/v1/chat/completions%20", "none"),
        ("POST", "/V1/chat/completions", "none"),
        ("GET", "/upstream/tts;v=1/x", "path tts;v=1"),
        ("GET", "/upstream/TTS/x", "path TTS"),
        ("GET", "/upstream/tts%00/x", "path tts\0"),
        ("GET", "/upstream/t%C3%A9/x", "path té"),
        ("GET", "/upstream/t%FF/x", "path t\N{REPLACEMENT CHARACTER}"),
        ("GET", "/upstream/tts%20", "none"),
        # what Go refuses, or a client library would send otherwise
        ("POST", "/v1/chat/completions%zz", "refused"),
        ("GET", "/upstream/tts/%", "refused"),
        ("GET", "/upstream/tts/%4", "refused"),
        ("OPTIONS", "/%zz", "refused"),
        ("GET", "/upstream/tts/é", "refused"),
        ("GET", "/upstream/tts/a b", "refused"),
        ("GET", "/upstream/tts/\0", "refused"),
        ("GET", "/upstream/tts/\t", "refused"),
        ("GET", "/upstream/tts?x=/", "refused"),
        ("GET", "", "refused"),
        ("GET", "upstream/tts/x", "refused"),
        ("GET", "http://host/upstream/tts/x", "refused"),
        ("OPTIONS", "*", "refused"),
        ("post", "/v1/chat/completions", "refused"),
        ("Get", "/upstream/tts/x", "refused"),
        ("get", "/health", "refused"),
        ("CONNECT", "/upstream/tts/x", "refused"),
        ("CONNECT", "/upstream//tts/x", "refused"),
    ],
)
def test_case_45_escaped_and_odd_targets_as_llama_swap_reads_them(method: str, path: str, expected: str) -> None:
    assert lease(method, path) == expected


@pytest.mark.parametrize(
    "path",
    ["/v1/audio/speech/", "/audio/speech", "/v/audio/speech", "/v1/chat/completions/", "/chat/completions", "/props/"],
)
def test_case_64_paths_that_llama_swap_does_not_have_are_left_to_its_404(path: str) -> None:
    assert lease("POST", path) == lease("GET", path) == "none"


def test_the_name_under_upstream_keeps_its_case_and_comes_with_all_segments() -> None:
    route = match("GET", "/upstream/Author%2FModel/v1/x")
    assert (route.name, route.rest) == ("Author", "Author/Model/v1/x")


@pytest.mark.parametrize(
    ("method", "path", "keyless"),
    [
        *((method, path, True) for method in ("GET", "HEAD") for path in ("/", "/health", "/wol-health", "/upstream")),
        *(("GET", "/-/healthz", True), ("GET", "/-/readyz", True), ("OPTIONS", "/v1/chat/completions", True)),
        *(("OPTIONS", "/-/metrics", True), ("GET", "/%68ealth", True), ("POST", "/health", False)),
        *(("GET", "/-/queue", False), ("GET", "/-/metrics", False), ("GET", "/%2D/healthz", False)),
        *(("GET", "/health/", False), ("GET", "//health", False), ("GET", "/v1/models", False)),
        *(("GET", "/upstream/", False), ("GET", "/upstream/x/", False), ("POST", "/v1/chat/completions", False)),
        *(("GET", "/health%2F", False), ("GET", "/running", False), ("GET", "/api/events", False)),
    ],
)
def test_which_routes_need_no_key(method: str, path: str, keyless: bool) -> None:
    assert match(method, path).keyless is keyless


@pytest.mark.parametrize(
    ("path", "anthropic"),
    [
        *(("/v1/messages", True), ("/v1/messages/count_tokens", True), ("/v/messages", True), ("/v1/messages/", True)),
        *(("/v1/messages/x", True), ("/v1/%6Dessages", True), ("/upstream/x/v1/messages", True)),
        *(("/v1/messagesx", False), ("/v1/chat/completions", False), ("/v2/messages", False), ("/messages", False)),
    ],
)
def test_errors_take_the_shape_of_the_api_that_is_spoken(path: str, anthropic: bool) -> None:
    assert match("POST", path).anthropic is anthropic


TOKENS = ["/", "/", "%2F", "%2e", ".", "..", "upstream", "comfyui", "v1", "chat", "completions", "tts", '"', "%", "a"]


@effort(deadline=None)
@given(st.sampled_from(METHODS), st.lists(st.sampled_from(TOKENS), max_size=9).map("".join))
def test_escaping_an_unreserved_letter_never_changes_the_decision(method: str, rest: str) -> None:
    """Otherwise one of the two spellings would pass the lock."""
    plain = f"/{rest}"
    escaped = plain.replace("t", "%74").replace("c", "%63")
    if "%" not in rest.replace("%2F", "").replace("%2e", ""):
        assert lease(method, plain) == lease(method, escaped)


@effort(deadline=None)
@given(st.text(max_size=12), st.binary(max_size=60))
@example("GET", b"/upstream/%2F")
@example("POST", b"/" + b"/" * 65_000)
@example("GET", b"/upstream/" + b"a%2F" * 20_000)
def test_any_target_whatsoever_has_a_route_or_is_refused(method: str, raw_path: bytes) -> None:
    for path in (raw_path, b"/" + raw_path, b"/upstream/" + raw_path):
        try:
            route = match_route(method, path)
        except BadTarget:
            continue
        assert (route.name is None) == (route.name_in not in {NameIn.PATH, NameIn.FIXED})


@pytest.mark.parametrize(
    ("path", "api"),
    [
        (b"/v1/chat/completions", "chat/completions"),
        (b"/v/completions", "completions"),
        (b"/v1/responses", "responses"),
        (b"/v1/messages", "messages"),
        (b"/v1/messages/count_tokens", None),
        (b"/v1/embeddings", None),
        (b"/completion", None),
        (b"/upstream/org/qwen/v1/chat/completions", "chat/completions"),
        (b"/upstream/qwen/completions", None),
        (b"/v1/models", None),
    ],
)
def test_the_text_api_of_a_path_decides_how_its_answer_can_be_streamed(path: bytes, api: str | None) -> None:
    assert match_route("POST", path).api == api
