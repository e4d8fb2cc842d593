"""Every way to name a model: for each row the model that llama-swap runs, the class, and the lease.

Each row is tested twice. Once as a pure decision: route, name, class, mode. Once through a running proxy: the answer is
held back while the proxy's queue is read, and what it has leased is compared with what the simulated llama-swap, which
shares no code with the proxy, has loaded and run. A row that loads nothing must not be leased, and a row that the proxy
refuses must not have come to llama-swap at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from known_support import Pair, known

from proxy.classify import Classification, Classifier
from proxy.errors import Refusal
from proxy.llama_swap import parse
from proxy.model_name import Undecidable, body_reader, is_rewritten
from proxy.routes import NameIn, match_route
from proxy.settings import Settings
from simulator_support import RawAnswer, send_raw

pytestmark = pytest.mark.asyncio(loop_scope="module")

MATRIX = """
models:
  q27: {aliases: [gpt-4o, openai/chat], filters: {setParamsByID: {"q27:high": {temperature: 1}}}}
  vis: {aliases: [voice], capabilities: {in: [text, image], out: [text]}}
  tts: {}
  kokoro: {}
  e: {}
  whisper: {}
  sd: {capabilities: {in: [text], out: [image]}}
  ranker: {capabilities: {reranker: true}}
  team: {}
  team/chat: {}
  hidden: {unlisted: true}
  comfyui_auto: {}
  singer: {capabilities: {in: [text], out: [audio]}}
selectors:
  pinned: {strategy: pin, targets: [vis, q27]}
  warm: {strategy: warm, targets: [q27, vis]}
  together: {strategy: warm, targets: [q27, kokoro]}
  spilling: {strategy: spillover, targets: [q27, kokoro], settings: {spillover: 2}}
profiles:
  night: {pins: {gpt-4o: vis, voice: "", cat: tts}}
peers:
  attic: {proxy: "http://127.0.0.1:1", models: [far, both]}
  cellar: {proxy: "http://127.0.0.1:2", models: [both]}
matrix:
  vars: {slashed: team/chat}
  sets:
    one: (q27 | vis | tts | whisper | sd | ranker | team | slashed | hidden | comfyui_auto | singer) & e
    two: q27 & kokoro & e
"""
GROUPS = """
models: {q27: {}, vis: {}, tts: {}, e: {}, whisper: {}, loner: {}}
upstream: {ignorePaths: ['^/static/']}
groups:
  big: {members: [q27, vis]}
  voice: {members: [tts, whisper], swap: false, exclusive: false}
  always: {members: [e], swap: false, exclusive: false, persistent: true}
"""
# No routing at all: every model excludes every other. Speech is named by hand, and embeddings are not resident.
PLAIN = "models: {chat: {}, speaker: {}, bge-m3: {}}\n"
CONFIGS = {"matrix": MATRIX, "groups": GROUPS, "plain": PLAIN}
CLASSES = {"embed": {"models": ["e"]}, "tts": {"models": ["speaker"]}}

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=xx"


@dataclass(frozen=True, slots=True)
class Row:
    """A request, and what it must come to: a leased model, or a status without a lease."""

    target: str
    want: str
    """`model class mode` or, without a lease, the status."""
    body: bytes = b""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    config: str = "matrix"
    profile: str | None = None
    ours: bool = False
    """The proxy answers by itself: nothing may come to llama-swap."""
    at_once: bool = False
    """The answer cannot be held back."""

    def __str__(self) -> str:
        about = self.headers.get("Content-Type", "").split(";")[0]
        parts = (self.config, self.profile, self.method, self.target, about, self.body[:40].decode("latin-1"))
        return " ".join(part for part in parts if part).replace("\r\n", " ").replace("::", ":")


def post(path: str, want: str, model: str = "", body: bytes | None = None, **more: Any) -> Row:
    """A POST of JSON that names `model`."""
    given = json.dumps({"model": model, "input": "x"}).encode() if body is None else body
    return Row(path, want, given, headers={"Content-Type": JSON, **more.pop("headers", {})}, **more)


def form(path: str, want: str, body: bytes, kind: str | None = FORM, **more: Any) -> Row:
    """A POST of a form, or of anything else that is not JSON."""
    return Row(path, want, body, headers={"Content-Type": kind} if kind else {}, **more)


def get(target: str, want: str, method: str = "GET", **more: Any) -> Row:
    return Row(target, want, method=method, **more)


def parts(*fields: tuple[str, str]) -> bytes:
    """A multipart body with boundary xx."""
    disposition = "Content-Disposition: form-data; name="
    text = "".join(f'--xx\r\n{disposition}"{name}"\r\n\r\n{value}\r\n' for name, value in fields)
    return f"{text}--xx--\r\n".encode()


GZIPPED = zlib.compress(b'{"model":"tts"}', wbits=31)
CHAT = "/v1/chat/completions"

ROWS = [
    # Where the body names the model: each route of the table. The path does not decide the class.
    post(CHAT, "q27 llm read", "q27"),
    post("/v1/completions", "vis llm read", "vis"),
    post("/v1/responses", "q27 llm read", "q27"),
    post("/v1/messages", "vis llm read", "vis"),
    post("/v1/messages/count_tokens", "q27 llm read", "q27"),
    post("/v1/embeddings", "e embed none", "e"),
    post("/v1/embeddings", "tts tts write", "tts"),
    post("/v1/embeddings", "q27 llm read", "q27"),
    post("/v1/rerank", "ranker embed read", "ranker"),
    post("/v1/reranking", "ranker embed read", "ranker"),
    post("/v1/audio/speech", "tts tts write", "tts"),
    post("/v1/audio/speech", "kokoro tts read", "kokoro"),
    post("/v1/audio/speech", "singer tts write", "singer"),
    post("/v1/audio/speech", "e embed none", "e"),
    post("/v1/audio/speech", "team tts write", "team"),
    post("/v1/audio/voices", "tts tts write", "tts"),
    post("/v1/images/generations", "sd image read", "sd"),
    post("/v1/images/edits", "sd image read", "sd"),
    post("/v1/audio/transcriptions", "whisper stt read", "whisper"),
    post("/rerank", "ranker embed read", "ranker"),
    post("/reranking", "ranker embed read", "ranker"),
    post("/infill", "q27 llm read", "q27"),
    post("/completion", "q27 llm read", "q27"),
    post("/sdapi/v1/txt2img", "sd image read", "sd"),
    post("/sdapi/v1/img2img", "sd image read", "sd"),
    post("/audioapi/v1/tasks/run", "tts tts write", "tts"),
    *(
        post(f"/v/{name}", "q27 llm read", "q27")
        for name in ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
    ),
    post("/v/embeddings", "e embed none", "e"),
    post("/v/rerank", "ranker embed read", "ranker"),
    post("/v/reranking", "ranker embed read", "ranker"),
    post("/v1/%63hat/completions", "tts tts write", "tts"),
    form("/v1/audio/transcriptions", "whisper stt read", parts(("model", "whisper"), ("x", "y")), MULTIPART),
    form("/v1/images/edits", "sd image read", parts(("x", "y"), ("model", "sd")), MULTIPART),
    # Where a query names it.
    *(get("/v1/audio/voices?model=tts", "tts tts write", method) for method in ("GET", "HEAD")),
    *(get("/props?model=vis", "vis llm read", method) for method in ("GET", "HEAD")),
    *(get("/sdapi/v1/loras?model=sd", "sd image read", method) for method in ("GET", "HEAD")),
    get("/v1/audio/voices?model=%74ts", "tts tts write"),
    get("/v1/audio/voices", "400", ours=True),
    # Where the path names it.
    get("/upstream/tts/health", "tts tts write", at_once=True),
    get("/upstream/tts/", "tts tts write"),
    get("/upstream/%74ts/props", "tts tts write"),
    post("/upstream/q27/v1/chat/completions", "q27 llm read", "tts"),
    get("/upstream/q27/slots/0", "q27 llm read", "DELETE"),
    get("/upstream/gpt-4o/props", "q27 llm read"),
    get("/upstream/openai/chat/props", "q27 llm read"),
    get("/upstream/q27:high/props", "q27 llm read"),
    get("/upstream/team/props", "team llm read"),
    get("/upstream/team/chat/props", "team/chat llm read"),
    get("/upstream/team%2Fchat/props", "team/chat llm read"),
    get("/upstream/team%2fchat/props", "team/chat llm read"),
    get("/upstream/hidden/props", "hidden llm read"),
    get("/upstream/attic/far/props", "attic/far llm none"),
    get("/upstream/pinned/props", "404", ours=True),
    get("/upstream/nobody/props", "404", ours=True),
    get("/upstream/tts", "301"),
    get("/upstream/tts", "308", "POST"),
    get("/upstream/team/chat", "301"),
    get("/upstream/tts/ui/app.js", "409"),
    get("/upstream/tts/favicon.ico", "409"),
    get("/upstream/tts/props", "204", "OPTIONS"),
    get("/upstream/tts/static/x", "tts tts write"),
    get("/upstream/tts/static/x", "409", config="groups"),
    get("/upstream/tts/ui/app.js", "tts tts write", config="groups"),
    get("/comfyui/", "comfyui_auto image read"),
    get("/comfyui/", "comfyui_auto image read", "POST"),
    get("/comfyui", "301"),
    get("/comfyui", "308", "POST"),
    get("/comfyui/queue", "409"),
    # What names a model beside its id.
    post(CHAT, "q27 llm read", "gpt-4o"),
    post(CHAT, "q27 llm read", "openai/chat"),
    post(CHAT, "q27 llm read", "q27:high"),
    post(CHAT, "vis llm read", "voice"),
    post(CHAT, "team/chat llm read", "team/chat"),
    post(CHAT, "hidden llm read", "hidden"),
    post(CHAT, "vis llm read", "pinned"),
    post(CHAT, "q27 llm write", "warm"),
    post(CHAT, "q27 llm read", "together"),
    post(CHAT, "q27 llm read", "spilling"),
    post(CHAT, "attic/far llm none", "attic/far"),
    post(CHAT, "attic/far llm none", "far"),
    post(CHAT, "attic/both llm none", "attic/both"),
    post(CHAT, "vis llm read", "gpt-4o", profile="night"),
    post(CHAT, "tts tts write", "cat", profile="night"),
    post(CHAT, "404", "voice", profile="night", ours=True),
    get("/upstream/gpt-4o/props", "vis llm read", profile="night"),
    form("/v1/audio/transcriptions", "vis llm read", parts(("model", "gpt-4o")), MULTIPART, profile="night"),
    form("/v1/audio/voices", "q27 tts write", b"model=gpt-4o", profile="night"),
    form("/v1/audio/speech?model=gpt-4o", "q27 tts write", b"x", "text/plain", profile="night"),
    # What names none.
    post(CHAT, "404", "both", ours=True),
    post(CHAT, "404", "nobody", ours=True),
    post(CHAT, "404", "TTS", ours=True),
    post(CHAT, "404", " tts ", ours=True),
    post(CHAT, "404", "q27:low", ours=True),
    post(CHAT, "400", body=b'{"messages":[]}', ours=True),
    post(CHAT, "400", body=b'{"model":5}', ours=True),
    post(CHAT, "400", body=b'[{"model":"tts"}]', ours=True),
    post(CHAT, "400", body='{"model":"tts"}'.encode("utf-16"), ours=True),
    post(CHAT, "400", body=GZIPPED, headers={"Content-Encoding": "gzip"}, ours=True),
    # JSON as llama-swap reads it: tolerantly, the first name counts, the query does not.
    post(CHAT, "tts tts write", body=b'{"model":"tts","model":"e"}'),
    post(CHAT, "e embed none", body=b'{"model":"e","model":"tts"}'),
    post(CHAT, "tts tts write", body=b'{"x":{"model":"e"},"model":"tts"}'),
    post(CHAT, "tts tts write", body=b'{"model":"tts","x":"'),
    post(CHAT, "tts tts write", body=b'{"model":"tts"} and more'),
    post(CHAT, "tts tts write", body=b'\xef\xbb\xbf{"model":"tts"}'),
    post(CHAT, "tts tts write", body=b'{"mod\\u0065l":"t\\u0074s"}'),
    post(f"{CHAT}?model=e", "tts tts write", "tts"),
    post(CHAT, "tts tts write", "tts", headers={"Content-Type": "application/json;charset=utf-8"}),
    post(CHAT, "tts tts write", "tts", headers={"Content-Type": "x; application/json"}),
    post(CHAT, "400", "tts", headers={"Content-Type": "Application/JSON"}, ours=True),
    # What is not JSON is a form, where the query counts.
    post(f"{CHAT}?model=tts", "tts tts write", "e", headers={"Content-Type": "Application/JSON"}),
    form(f"{CHAT}?model=tts", "tts tts write", b'{"model":"e"}', None),
    form(f"{CHAT}?model=tts", "tts tts write", b'{"model":"e"}', "text/plain"),
    form(CHAT, "400", b'{"model":"e"}', "text/plain", ours=True),
    form(CHAT, "tts tts write", b"x=1&model=t%74s"),
    form("/v1/audio/transcriptions?model=whisper", "whisper stt read", parts(("x", "y")), MULTIPART),
    # Paths: decoded before they are compared, not cleaned.
    post("/v1/audio/speech/", "404", "tts"),
    post("/audio/speech", "404", "tts"),
    post("/v/audio/speech", "404", "tts"),
    post("//v1/audio/speech", "307", "tts"),
    post("/v1/./audio/speech", "307", "tts"),
    post("/v1/x/../audio/speech", "307", "tts"),
    post("/v1/x/%2e%2e/audio/speech", "404", "tts"),
    post("/v1%2Faudio/speech", "404", "tts"),
    post("/v1/audio/%zz", "400", "tts", ours=True),
    # What loads nothing.
    *(
        get(path, "200")
        for path in ("/v1/models", "/models", "/health", "/wol-health", "/running", "/metrics", "/logs")
    ),
    *(get(path, "200") for path in ("/api/profiles", "/unload", "/ui/")),
    *(get(path, "302") for path in ("/", "/upstream")),
    get("/v1/models", "405", "DELETE"),
    get(CHAT, "405"),
    get(CHAT, "204", "OPTIONS"),
    get("/foo", "404"),
    get("/favicon.ico", "404"),
    post("/api/models/unload/tts", "200"),
    # Groups: what stays beside everything takes no lease; speech writes, for a chat of an exclusive group stops it.
    post(CHAT, "q27 llm read", "q27", config="groups"),
    post(CHAT, "loner llm read", "loner", config="groups"),
    post("/v1/embeddings", "e embed none", "e", config="groups"),
    post(CHAT, "whisper stt read", "whisper", config="groups"),
    # No routing: settings decide the class, and embeddings that are not always resident take a lease.
    post("/v1/audio/speech", "speaker tts write", "speaker", config="plain"),
    post("/v1/embeddings", "bge-m3 embed read", "bge-m3", config="plain"),
    post("/v1/audio/speech", "chat tts write", "chat", config="plain"),
    post(CHAT, "chat llm read", "chat", config="plain"),
    get("/comfyui/", "404", config="plain", ours=True),
]


async def test_the_table_is_long_enough_and_has_no_row_twice() -> None:
    assert len(ROWS) >= 60
    assert len({(str(row), row.body, tuple(row.headers.items())) for row in ROWS}) == len(ROWS)


CLASSIFIERS = {
    name: Classifier(Settings.model_validate({"classes": CLASSES}), config=parse(text, {}))
    for name, text in CONFIGS.items()
}


def decide(row: Row) -> Classification | None:
    """What the proxy's pure parts make of a row; None for no lease. Raises Refusal and Undecidable."""
    path, _, query = row.target.encode().partition(b"?")
    classifier = CLASSIFIERS[row.config]
    route = classifier.refine(match_route(row.method, path), row.profile)
    if route.name_in is NameIn.NOWHERE:
        return None
    name, rewritten = route.name or "", True
    content_type = row.headers.get("Content-Type", "").encode() or None
    if route.name_in in {NameIn.BODY, NameIn.QUERY}:
        reader = body_reader(content_type, query, row.method)
        for byte in row.body:
            reader.feed(bytes([byte]))
        name, rewritten = reader.finish(), is_rewritten(content_type, query, row.method)
    return classifier.classify(route, name, row.profile, rewritten=rewritten)


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_the_decision(row: Row) -> None:
    try:
        what = decide(row)
    except Refusal as refusal:
        found = str(refusal.status)
    except Undecidable:
        found = "400"
    else:
        found = f"{what.model} {what.class_name} {what.mode}" if what else "no lease"
    assert found == (row.want if row.ours or not row.want.isdecimal() else "no lease")


# End to end.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs() -> AsyncIterator[dict[str, Pair]]:
    """One proxy and one simulator for each configuration."""
    async with contextlib.AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(known(text, time_scale=0.001, classes=CLASSES))
            for name, text in CONFIGS.items()
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a row: the answer, and what the proxy held meanwhile."""

    answer: RawAnswer
    leased: list[str]


async def carried_out(pair: Pair, row: Row, name: str) -> Outcome:
    """Sends a row, held back as `name` until the proxy's queue has been read."""
    headers = {**row.headers, "x-sim-hold": name}
    sending = asyncio.create_task(send_raw(pair.url, row.method, row.target, headers, row.body))
    leased: list[str] = []
    while not sending.done() and not leased:
        if not row.at_once and not row.want.isdecimal():
            holders = (await pair.proxy.queue())["holders"]
            leased = [f"{each['model']} {each['class']} {each['mode']}" for each in holders]
        await asyncio.wait({sending}, timeout=0.002)
    await pair.simulator.release(name)
    return Outcome(await sending, leased)


@pytest.mark.parametrize("row", ROWS, ids=str)
async def test_through_the_proxy_exactly_what_llama_swap_runs_is_leased(row: Row, pairs: dict[str, Pair]) -> None:
    pair = pairs[row.config]
    if row.profile:
        await pair.proxy.client.put("/api/profiles/active", json={"name": row.profile})
    await pair.simulator.client.get("/unload")
    await pair.simulator.reset()
    try:
        outcome = await carried_out(pair, row, str(ROWS.index(row)))
    finally:
        if row.profile:
            await pair.proxy.client.put("/api/profiles/active", json={"name": None})

    log = await pair.simulator.log()
    ran = [each for each in log["requests"] if each["started"] is not None]
    lease_class = outcome.answer.headers.get("x-lease-class")
    if row.want.isdecimal():
        assert (outcome.answer.status, lease_class, ran) == (int(row.want), None, [])
        assert log["totals"]["loads"] == 0
        assert not (row.ours and log["requests"])
        return
    model, class_name, mode = row.want.split()
    assert (outcome.answer.status, lease_class) == (200, class_name)
    assert outcome.leased == ([] if row.at_once else [f"{model} {class_name} {mode}"])
    if "/" in model and model.split("/")[0] in {"attic", "cellar"}:
        assert (ran, log["totals"]["loads"]) == ([], 0)
        return
    assert [each["model"] for each in ran] == [model]
    assert log["totals"]["loads_by_model"] == {model: 1}
    await pair.proxy.until(waiters=0, holders=0)
