"""Which requests load which model, and what all others are told: on the simulator and on a real llama-swap."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from llama_swap_support import LlamaSwap
from simulator_support import RawAnswer, Simulator, send_raw

CONFIG = """
models:
  q27:
    aliases: [gpt-4o]
    filters: {setParamsByID: {"${MODEL_ID}:high": {temperature: 1}}}
  vis: {}
  tts: {}
  e: {unlisted: true}
  author/model: {}
  comfyui_auto: {}
selectors:
  first: {strategy: pin, targets: [vis, q27]}
  warmest: {strategy: warm, targets: [q27, tts]}
profiles:
  night: {pins: {q27: vis, virtual: tts, quiet: ~, a/pin: vis}}
peers:
  far: {proxy: "http://127.0.0.1:9", models: [only-there, both]}
  away: {proxy: "http://127.0.0.1:9", models: [both]}
groups:
  all: {swap: false, exclusive: false, members: [q27, vis, tts, e, author/model, comfyui_auto]}
"""
CHAT = "/v1/chat/completions"
HEARD = "/v1/audio/transcriptions"
NO_ID = "no model id could be identified"
NO_ROUTER = "no router for requested model"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
MULTIPART = {"Content-Type": "multipart/form-data; boundary=xx"}


@dataclass(frozen=True)
class Case:
    method: str
    target: str
    status: int
    loads: str | None = None
    says: str = ""
    location: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


def post(target: str, model: str, status: int = 200, loads: str | None = None, says: str = "") -> Case:
    return Case("POST", target, status, loads, says, headers={"Content-Type": "application/json"}, body=_json(model))


def get(target: str, status: int = 200, loads: str | None = None, says: str = "", location: str = "") -> Case:
    return Case("GET", target, status, loads, says, location)


def typed(content_type: str, body: bytes, loads: str | None = None, says: str = "", target: str = CHAT) -> Case:
    headers = {"Content-Type": content_type} if content_type else {}
    return Case("POST", target, 200 if loads else 404, loads, says, headers=headers, body=body)


def form(query: str, body: bytes, loads: str | None, headers: dict[str, str] = FORM) -> Case:
    return Case("POST", HEARD + query, 200 if loads else 404, loads, headers=headers, body=body)


def _json(model: str) -> bytes:
    return json.dumps({"model": model}).encode()


def _fields(*pairs: tuple[str, str]) -> bytes:
    parts = [f"--xx\r\nContent-Disposition: form-data; name={name}\r\n\r\n{value}\r\n" for name, value in pairs]
    return ("".join(parts) + "--xx--\r\n").encode()


BODY_ROUTES = [
    *("/rerank", "/reranking", "/infill", "/completion", "/sdapi/v1/txt2img", "/sdapi/v1/img2img"),
    *("/v1/images/generations", "/v1/audio/speech", "/v1/audio/voices", "/audioapi/v1/tasks/run"),
    *("/v1/audio/transcriptions", "/v1/images/edits"),
    *(
        f"{version}/{name}"
        for version in ("/v1", "/v")
        for name in ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
    ),
    *(f"{version}/{name}" for version in ("/v1", "/v") for name in ("embeddings", "rerank", "reranking")),
]
ROUTES = [
    *(post(path, "tts", loads="tts") for path in BODY_ROUTES),
    *(Case("GET", path, 405) for path in BODY_ROUTES if path != "/v1/audio/voices"),
    *(post(path + "/", "tts", 404) for path in BODY_ROUTES),
    *(get(f"{path}?model=tts", loads="tts") for path in ("/v1/audio/voices", "/props", "/sdapi/v1/loras")),
    *(Case("HEAD", f"{path}?model=tts", 200, "tts") for path in ("/v1/audio/voices", "/props", "/sdapi/v1/loras")),
    get("/props", 404, says=NO_ID),
    get("/props?model=nobody", 404, says=NO_ROUTER),
    post("/audio/speech", "tts", 404),
    post("/v/audio/speech", "tts", 404),
    post("/v1/audio/speech/long", "tts", 404),
    post("/v1/%63hat/completions", "vis", loads="vis"),
    post("/v1%2Fchat/completions", "vis", 404),
    Case("POST", "//v1/chat/completions?a=b", 307, location="/v1/chat/completions?a=b", body=_json("vis")),
    Case("POST", "/v1/./chat/completions", 307, location="/v1/chat/completions", body=_json("vis")),
    Case("POST", "/x/../v1/chat/completions", 307, location="/v1/chat/completions", body=_json("vis")),
    *(get(path) for path in ("/health", "/wol-health", "/v1/models", "/models", "/running", "/logs", "/unload")),
    get("/ui", 307, location="/ui/"),
    Case("POST", "/ui", 405),
    *(get(path) for path in ("/api/profiles", "/api/version", "/metrics")),
    *(get(path, 302) for path in ("/", "/upstream")),
    *(Case("OPTIONS", path, 204) for path in ("/anything", CHAT, "/upstream/vis/x")),
    *(get(path, 404) for path in ("/nothing", "/health/", "/api/")),
]
UPSTREAM = [
    *(Case(method, "/upstream/vis/x", 200, "vis") for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")),
    get("/upstream/gpt-4o/x", loads="q27"),
    get("/upstream/q27:high/x", loads="q27"),
    get("/upstream/%76is/", loads="vis"),
    get("/upstream/author/model/x", loads="author/model"),
    get("/upstream/author%2Fmodel/x", loads="author/model"),
    get("/upstream/author/x", 404, says="model not found"),
    get("/upstream/nobody/", 404, says="model not found"),
    get("/upstream/first/x", 404, says="model not found"),
    get("/upstream/vis", 301, location="/upstream/vis/"),
    get("/upstream/vis?a=b", 301, location="/upstream/vis/?a=b"),
    Case("POST", "/upstream/vis", 308, location="/upstream/vis/"),
    get("/upstream/author%2Fmodel", 301, location="/upstream/author/model/"),
    get("/upstream/vis//x", 307, location="/upstream/vis/x"),
    get("/upstream/vis/../x", 307, location="/upstream/x"),
    get("/upstream/vis/%zz", 400),
    *(get(f"/upstream/vis/a.{kind}", 409, says="vis is not loaded") for kind in ("js", "json", "css", "ico", "txt")),
    get("/upstream/vis/a.jsx", loads="vis"),
    get("/comfyui/", loads="comfyui_auto"),
    Case("POST", "/comfyui/?a=b", 200, "comfyui_auto"),
    get("/comfyui?a=b", 301, location="/comfyui/?a=b"),
    Case("POST", "/comfyui", 308, location="/comfyui/"),
    get("/comfyui/x", 409, says="comfyui_auto is not loaded"),
]
NAMES = [
    *(post(CHAT, name, loads="q27") for name in ("q27", "gpt-4o", "q27:high", "warmest")),
    post(CHAT, "first", loads="vis"),
    post(CHAT, "e", loads="e"),
    post(CHAT, "author/model", loads="author/model"),
    *(post(CHAT, name, 404, says=NO_ROUTER) for name in ("nobody", " tts ", "TTS", "both", "virtual")),
    post(CHAT, "", 404, says=NO_ID),
    post("/v1/embeddings", "tts", loads="tts"),
]
BODIES = [
    *(
        typed("application/json", body, loads="tts")
        for body in (
            b'{"model":"tts"', b'{"model":"tts"} tail', b'\xef\xbb\xbf{"model":"tts"}', b'{"x":NaN,"model":"tts"}',
            b'{"mod\\u0065l":"t\\u0074s"}', b'{"model":"tts","model":"vis"}', b'{"a":{"model":"vis"},"model":"tts"}',
            b'\xff{"model":"tts"}', b'{"a":"\\"model\\":\\"vis\\"","model":"tts"}',
        )
    ),
    *(
        typed("application/json", body, says=says)
        for body, says in (
            (gzip.compress(_json("tts")), NO_ID), ('{"model":"tts"}'.encode("utf-16"), NO_ID),
            (b'[{"model":"tts"}]', NO_ID), (b'{"model":true}', NO_ROUTER), (b'{"model":null}', NO_ID),
            (b"", NO_ID), (b'{"model":5}', NO_ROUTER),
        )
    ),
    *(
        typed(content_type, _json("tts"), loads="tts")
        for content_type in (
            "application/json;charset=utf-8", "x/application/json", "application/jsonx",
            "multipart/form-data; boundary=application/json",
        )
    ),
    *(
        typed(content_type, _json("tts"), says=NO_ID)
        for content_type in ("", "text/plain", "Application/JSON", "application/vnd.x+json")
    ),
    typed("", b"", loads="vis", target=f"{CHAT}?model=vis"),
    typed("text/plain", _json("tts"), loads="vis", target=f"{CHAT}?model=vis"),
    typed("application/json", _json("tts"), loads="tts", target=f"{CHAT}?model=vis"),
    typed("", b"", loads="tts", target=f"{CHAT}?model=tts&model=vis"),
    form("", b"model=tts&a=b", "tts"),
    form("?model=vis", b"model=tts", "tts"),
    form("?model=vis", b"a=b", "vis"),
    form("?x=1;model=vis", b"a=b", None),
    form("?model=%zz&model=vis", b"a=b", "vis"),
    form("", _fields(('"model"', "tts"), ('"model"', "vis")), "tts", MULTIPART),
    form("?model=vis", _fields(('"model"', "tts")), "vis", MULTIPART),
    form("?model=", _fields(('"model"', "tts")), None, MULTIPART),
    form("", _fields(('"model"; filename="a"', "tts"), ("model", "vis")), "vis", MULTIPART),
    form("", _fields(('"file"; filename="a"', "\r\n--x\r\n"), ('"model"', "vis")), "vis", MULTIPART),
    form("", b"no form at all", None, MULTIPART),
    form("", _fields(('"model"', "tts")), None, {"Content-Type": "multipart/form-data"}),
]  # fmt: skip
FORMS_OF_ERRORS = [
    Case(
        "POST", CHAT, 404, says=f"llama-swap: {NO_ROUTER}", body=_json("nobody"),
        headers={"Content-Type": "application/json", "Accept": "application/json, text/plain, */*"},
    ),
    Case("GET", "/upstream/nobody/x", 404, says="llama-swap: model not found", headers={"Accept": "text/plain"}),
    Case("GET", "/upstream/nobody/x", 404, says="<p>model not found</p>", headers={"Accept": "text/html"}),
    Case("GET", "/upstream/nobody/x", 404, says='{"src":"llama-swap","error":{"message":"model not found"'),
]  # fmt: skip
KEYED = CONFIG + "apiKeys: [right, other]\n"


def _basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"user:{password}".encode()).decode()


CREDENTIALS = [
    ({}, False),
    ({"Authorization": "Bearer right"}, True),
    ({"Authorization": "bearer other"}, True),
    ({"Authorization": "Bearer wrong"}, False),
    ({"Authorization": "right"}, False),
    ({"x-api-key": "right"}, True),
    ({"Authorization": _basic("right"), "x-api-key": "wrong"}, True),
    ({"Authorization": _basic("wrong"), "x-api-key": "right"}, False),
    ({"Authorization": "Bearer wrong", "x-api-key": "right"}, False),
    ({"Authorization": "Basic !", "x-api-key": "right"}, True),
]

TARGETS = [
    pytest.param("simulator", id="simulator"),
    pytest.param("llama-swap", id="llama-swap", marks=pytest.mark.llama_swap),
]


def start(target: str, config: str) -> Simulator | LlamaSwap:
    if target == "simulator":
        return Simulator(config, time_scale=0.0)
    return LlamaSwap(config, time_scale=0.0, slow_loads=False)


async def mistake(upstream: Simulator | LlamaSwap, case: Case) -> str:
    """What is not as `case` has it, or nothing; all models are unloaded before."""
    await upstream.client.get("/unload")
    answer = await send_raw(upstream.url, case.method, case.target, case.headers, case.body)
    loaded = [each["model"] for each in (await upstream.client.get("/running")).json()["running"]]
    wanted = (case.status, [case.loads] if case.loads else [], case.location)
    got = (answer.status, loaded, answer.headers.get("location", "") if case.location else "")
    if wanted == got and case.says in answer.body.decode("latin-1"):
        return ""
    return f"{case}: {got} {answer.body[:200]!r}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(ROUTES, id="routes"),
        pytest.param(UPSTREAM, id="upstream"),
        pytest.param(NAMES, id="names"),
        pytest.param(BODIES, id="bodies"),
        pytest.param(FORMS_OF_ERRORS, id="errors"),
    ],
)
async def test_what_each_request_is_told_and_which_model_it_loads(cases: list[Case], target: str) -> None:
    async with start(target, CONFIG) as upstream:
        mistakes = [await mistake(upstream, case) for case in cases]
    assert [each for each in mistakes if each] == []


@pytest.mark.parametrize("target", TARGETS)
async def test_a_profile_pins_names_on_every_route_and_can_switch_one_off(target: str) -> None:
    async with start(target, CONFIG) as upstream:
        answer = await upstream.client.put("/api/profiles/active", json={"name": "night"})
        assert (answer.status_code, answer.json()) == (200, {"active": "night"})
        assert (await upstream.client.get("/api/profiles")).json()["active"] == "night"
        pinned = [
            post(CHAT, "q27", loads="vis"),
            post(CHAT, "gpt-4o", loads="q27"),
            post(CHAT, "virtual", loads="tts"),
            post(CHAT, "quiet", 404, says=NO_ID),
            get("/upstream/q27/x", loads="vis"),
            get("/upstream/virtual/x", loads="tts"),
            get("/upstream/virtual", 301, location="/upstream/tts/"),
            get("/upstream/a/pin/x", loads="vis"),
            get("/upstream/quiet/x", 404, says="model not found"),
        ]
        mistakes = [await mistake(upstream, case) for case in pinned]
        assert [each for each in mistakes if each] == []
        answers = [
            await send_raw(upstream.url, "PUT", "/api/profiles/active", {}, body)
            for body in (b'{"name":"nobody"}', b"{}", b"{", b'{"name":5}', b'{"name":null}')
        ]
        assert [answer.status for answer in answers] == [404, 400, 400, 400, 200]
        assert await mistake(upstream, post(CHAT, "q27", loads="q27")) == ""


@pytest.mark.parametrize("target", TARGETS)
async def test_with_keys_each_route_but_a_few_wants_one_and_a_refused_request_loads_nothing(target: str) -> None:
    async with start(target, KEYED) as upstream:
        for headers, right in CREDENTIALS:
            answer = await _chat(upstream.url, headers)
            assert (answer.status == 200) == right, headers
            if not right:
                assert answer.status == 401
                assert answer.headers["www-authenticate"] == 'Basic realm="llama-swap"'
        listed = ("/v1/models", "/running", "/metrics", "/logs", "/api/profiles", "/unload", "/upstream/vis/x")
        assert {(await send_raw(upstream.url, "GET", path)).status for path in listed} == {401}
        free = {path: (await send_raw(upstream.url, "GET", path)).status for path in ("/health", "/wol-health", "/")}
        assert free == {"/health": 200, "/wol-health": 200, "/": 302}
        assert (await send_raw(upstream.url, "OPTIONS", CHAT)).status == 204
        assert (await send_raw(upstream.url, "GET", "/nothing")).status == 404
        upstream.client.headers["x-api-key"] = "right"
        await upstream.client.get("/unload")
        await _chat(upstream.url, {})
        assert (await upstream.client.get("/running")).json() == {"running": []}


async def _chat(url: str, headers: dict[str, str]) -> RawAnswer:
    return await send_raw(url, "POST", CHAT, {"Content-Type": "application/json", **headers}, _json("vis"))


@pytest.mark.parametrize("target", TARGETS)
async def test_the_model_list_tells_of_aliases_selectors_peers_and_capabilities(target: str) -> None:
    described = """
models:
  q27:
    name: Q
    description: chats
    aliases: [gpt-4o]
    metadata: {color: red}
    capabilities: {in: [text, image], out: [text], tools: true, context: 4096}
  hidden: {unlisted: true}
selectors: {warmest: {strategy: warm, targets: [q27]}}
profiles: {night: {pins: {virtual: q27}}}
peers: {far: {proxy: "http://127.0.0.1:9", models: [there]}}
includeAliasesInList: true
"""
    async with start(target, described) as upstream:
        await upstream.client.put("/api/profiles/active", json={"name": "night"})
        records: list[dict[str, Any]] = (await upstream.client.get("/v1/models")).json()["data"]
        about = {each["id"]: each["meta"]["llamaswap"] for each in records}
        assert about == {
            "far/there": {"type": "peer", "peerID": "far"},
            "gpt-4o": {"type": "alias", "modelID": "q27", "color": "red"},
            "q27": {"type": "model", "aliases": ["gpt-4o"], "color": "red"},
            "virtual": {"type": "profile"},
            "warmest": {"type": "selector", "strategy": "warm", "targets": ["q27"]},
        }
        (q27,) = (each for each in records if each["id"] == "q27")
        assert {each["status"]["value"] for each in records} == {"unloaded"}
        assert (q27["name"], q27["description"], q27["context_length"]) == ("Q", "chats", 4096)
        assert q27["capabilities"] == {"vision": True, "function_calling": True}
        assert q27["architecture"] == {
            "input_modalities": ["text", "image"],
            "output_modalities": ["text"],
            "modality": "text+image->text",
        }
        await send_raw(upstream.url, "POST", CHAT, {"Content-Type": "application/json"}, _json("warmest"))
        records = (await upstream.client.get("/v1/models")).json()["data"]
        loaded = [each["id"] for each in records if each["status"]["value"] == "loaded"]
        assert loaded == ["gpt-4o", "q27", "warmest"]
