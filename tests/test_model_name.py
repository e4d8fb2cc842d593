"""The name that is read is llama-swap's, or none.

`vectors/json_model.jsonl` was made by the parser that llama-swap uses. Expectations about forms were checked
against Go's net/http.
"""

import asyncio
import base64
import io
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.model_name import Undecidable, asks_for_stream, body_reader, name_from_query, stream_reader

JSON = b"application/json"
URLENCODED = b"application/x-www-form-urlencoded"
MULTIPART = b"multipart/form-data; boundary=B"

VECTORS = [
    (vector["name"], base64.b64decode(vector["body_b64"]), base64.b64decode(vector["model_b64"]))
    for vector in map(json.loads, (Path(__file__).parent / "vectors" / "json_model.jsonl").read_text().splitlines())
]


def name_of(
    body: bytes,
    content_type: bytes | None = JSON,
    query: bytes = b"",
    *,
    cuts: Any = (),
    method: str = "POST",
    stream: bool = False,
) -> str | None:
    """What is read from the body, fed in pieces that end at `cuts`; None for Undecidable."""
    reader = body_reader(content_type, query, method, stream=stream)
    start = 0
    for cut in (*cuts, len(body)):
        reader.feed(body[start:cut])
        start = cut
    try:
        return reader.finish()
    except Undecidable:
        return None


def first_model(body: bytes) -> str | None:
    """The first top-level `model` of a valid UTF-8 JSON object, if it is a non-empty string."""
    try:
        root = json.loads(body.decode(), object_pairs_hook=lambda pairs: ("object", pairs))
    except (ValueError, RecursionError):
        return None
    if not isinstance(root, tuple):
        return None
    value = next((value for key, value in root[1] if key == "model"), None)
    return value if isinstance(value, str) and value else None


# JSON


def test_a_vector_gives_the_name_that_llama_swap_reads_or_none() -> None:
    for title, body, expected in VECTORS:
        name = name_of(body)
        assert name is None or name.encode() == expected, title
        assert name is not None or first_model(body) is None, title


def test_the_vectors_show_something() -> None:
    assert len(VECTORS) == 1567
    assert sum(name_of(body) is not None for _, body, _ in VECTORS) >= 141
    assert sum(first_model(body) is not None for _, body, _ in VECTORS) >= 20


def test_a_vector_cut_anywhere_reads_as_the_whole() -> None:
    for title, body, _ in VECTORS:
        whole = name_of(body)
        assert name_of(body, cuts=range(1, len(body))) == whole, title
        for cut in range(1, len(body), 1 + len(body) // 2000):
            assert name_of(body, cuts=[cut]) == whole, (title, cut)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"embed-a","model":"tts-a"}', "embed-a"),
        (b'{"model":"tts-a","model":"embed-a"}', "tts-a"),
        (b'{"mod\\u0065l":"tts-a","model":"embed-a"}', "tts-a"),
        (b'{"metadata":{"model":"embed-a"},"model":"tts-a"}', "tts-a"),
        (b'{"x":"\\"model\\":\\"embed-a\\"","model":"tts-a"}', "tts-a"),
        (b'{"model":null,"model":"tts-a"}', None),
    ],
)
def test_case_55_the_first_model_counts(body: bytes, expected: str | None) -> None:
    assert name_of(body) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"tts-a"} trailing', "tts-a"),
        (b'{"model":"tts-a",', "tts-a"),
        (b'\xef\xbb\xbf{"model":"tts-a"}', "tts-a"),
        ('{"model":"tts-a"}'.encode("utf-16"), None),
        ('{"model":"tts-a"}'.encode("utf-16-le"), None),
        (b'{"temperature":NaN,"model":"tts-a"}', "tts-a"),
        (b'{"temperature":-Infinity,"model":"tts-a"}', "tts-a"),
        (b'{"model":"tts\\u002da"}', "tts-a"),
        # What llama-swap would look up: a lone surrogate is U+FFFD to it.
        (b'{"model":"\\ud800"}', "\ufffd"),
        (b'{"model":"a\\ud800\\u0041b"}', "a\ufffdb"),
        (b'{"model":"\\udc00\\ud800"}', "\ufffd"),
        (b'{"model":"\\ud83d\\ude00"}', "\U0001f600"),
        (b'{"model":5}', None),
        (b'{"model":null}', None),
        (b'{"model":true}', None),
        (b'{"model":{"id":"tts-a"}}', None),
        (b'{"model":["tts-a"]}', None),
        (b'{"model":""}', None),
        (b'{"model":"tts-a', None),
        (b'{"messages":[]}', None),
        (b'[{"model":"tts-a"}]', None),
        (b'"model"', None),
        (b"", None),
        # Invalid, and gjson would read them in its own way.
        (b'{"model":"tts\xff"}', None),
        (b'{"model":"tts\xed\xa0\x80"}', None),
        (b'{"model":"tts\n"}', None),
        (b'{"model":"tts\\q"}', None),
        (b'{"model\\u12":"tts-a"}', None),
        (b'{"model\x01\\n":"embed-a","model":"tts-a"}', None),
        (b'{"x":(),"model":"tts-a"}', None),
        (b'{"x":[)"model":"embed-a"],"model":"tts-a"}', None),
        (b'{"x":[(],"model":"embed-a"],"model":"tts-a"}', None),
        (b'{"x":[1]},"model":"tts-a"}', None),
        (b'{"x":1"model":"tts-a"}', None),
    ],
)
def test_case_56_broken_json_gives_llama_swaps_name_or_none(body: bytes, expected: str | None) -> None:
    assert name_of(body) == expected
    assert name_of(body, cuts=range(1, len(body))) == expected


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(b"[" * 100_000 + b"]" * 100_000, id="deep array"),
        pytest.param(b'{"a":' * 100_000 + b"1" + b"}" * 100_000, id="deep object"),
        pytest.param(b"[[],[{}],[[]]," * 1000 + b"1" + b"]" * 1000, id="ragged"),
        pytest.param(b'"' + b"y" * 5_000_000 + b'"', id="long string"),
        pytest.param(b'"' + b'\\"\\\\' * 500_000 + b'"', id="long escaped string"),
        pytest.param(b'[{"a":"' + b'\\\\\\"]}' * 500_000 + b'"}]', id="long nested string"),
        pytest.param(b"9" * 1_000_000, id="long number"),
        pytest.param(b"-1.5E-300", id="float"),
        pytest.param(b" \t\r\n" * 100_000 + b"null", id="whitespace"),
        pytest.param(b'"]}{[()"', id="brackets in a string"),
        pytest.param(b'["]}","\\"]}",{"(":"["}]', id="brackets in nested strings"),
    ],
)
@pytest.mark.parametrize("size", [1 << 30, 65536, 4093])
def test_what_stands_before_the_model_does_not_matter(before: bytes, size: int) -> None:
    body = b'{"x":' + before + b' ,\r\n\t"model" : "tts-a"}'
    assert name_of(body, cuts=range(size, len(body), size)) == "tts-a"


def test_a_long_key_is_not_the_model() -> None:
    assert name_of(b'{"model' + b"l" * 100_000 + b'":"embed-a","model":"tts-a"}') == "tts-a"
    assert name_of(b'{"model' + b"\\u0041" * 2_000 + b'":"embed-a","model":"tts-a"}') == "tts-a"


@pytest.mark.parametrize("unit", ["y", "é", "\\u0041", "\\u20ac", "\\ud83d\\ude00", "\\/"])
def test_a_name_of_32_kibibytes_passes_and_a_longer_one_does_not(unit: str) -> None:
    size = len(json.loads(f'"{unit}"').encode())
    count = 32 * 1024 // size
    assert name_of(f'{{"model":"{unit * count}"}}'.encode()) is not None
    assert name_of(f'{{"model":"{unit * (count + 1)}"}}'.encode()) is None
    assert name_of(f'{{"model":"{unit * 50_000}"}}'.encode()) is None


def test_nothing_after_the_name_is_looked_at() -> None:
    reader = body_reader(JSON, b"")
    reader.feed(b'{"model":"tts-a"')
    for chunk in (b',"model":"embed-a"}', b"\x00" * 1000, b'{"model":"embed-a"}'):
        reader.feed(chunk)
    assert reader.finish() == "tts-a"
    assert reader.finish() == "tts-a"


SPACE = st.sampled_from(["", " ", "\n", "\r\n", "\t", "  \t\r\n "])
TEXT = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["model", "Model", "mode", "model ", "stream", "streams", "tts-a", '"', "\\", "[{", ")"]),
)


@st.composite
def json_strings(draw: st.DrawFn, text: str) -> str:
    """One of the spellings of this text as a JSON string."""
    spelled = []
    for character in text:
        plain = json.dumps(character)[1:-1]
        options = [plain, plain.upper().replace("\\U", "\\u") if plain.startswith("\\u") else plain]
        if character >= " " and character not in '"\\':
            options.append(character)
        if ord(character) < 0x10000:
            options += [f"\\u{ord(character):04x}", f"\\u{ord(character):04X}"]
        if character == "/":
            options.append("\\/")
        spelled.append(draw(st.sampled_from(options)))
    return '"' + "".join(spelled) + '"'


def json_values() -> st.SearchStrategy[str]:
    scalars = st.one_of(
        st.sampled_from(["null", "true", "false", "0", "-1.5e+3", "1E400", "NaN", "-Infinity", "123456789" * 20]),
        TEXT.flatmap(json_strings),
    )
    return st.recursive(scalars, lambda inner: st.one_of(arrays(inner), objects(inner)), max_leaves=8)


def arrays(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    items = st.lists(st.tuples(SPACE, inner, SPACE).map("".join), max_size=3)
    return items.map(lambda parts: "[" + ",".join(parts) + "]")


def objects(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    key = TEXT.flatmap(json_strings)
    pairs = st.lists(st.tuples(SPACE, key, SPACE, st.just(":"), SPACE, inner, SPACE).map("".join), max_size=4)
    return st.tuples(SPACE, pairs).map(lambda parts: "{" + parts[0] + ",".join(parts[1]) + "}")


@given(text=st.tuples(SPACE, objects(json_values()), SPACE).map("".join), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_valid_object_gives_its_first_model_if_that_is_a_string(text: str, data: st.DataObject) -> None:
    body = text.encode()
    expected = first_model(body)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=4)))
    assert name_of(body, cuts=cuts) == expected


# Whether a stream is asked for


def streamed(body: bytes, *, cuts: Any = (), named: bool = True) -> bool | None:
    """What is learned of a JSON body, fed in pieces that end at `cuts`; `named` where its model counts too."""
    reader = body_reader(JSON, b"", stream=True) if named else stream_reader(JSON)
    assert reader is not None
    start = 0
    for cut in (*cuts, len(body)):
        reader.feed(body[start:cut])
        start = cut
    return asks_for_stream(reader)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"a","stream":true}', True),
        (b'{"stream":true,"model":"a"}', True),
        (b'{"stream" : true , "model":"a"}', True),
        (b'{"str\\u0065a\\u006D":true,"model":"a"}', True),
        (b'{"model":"a","stream":false}', False),
        (b'{"model":"a"}', False),
        (b'{"model":"a","stream":null}', False),
        (b'{"model":"a","stream":1}', False),
        (b'{"model":"a","stream":"true"}', False),
        (b'{"model":"a","stream":[true]}', False),
        (b'{"model":"a","Stream":true,"streams":true,"strea":true}', False),
        (b'{"model":"a","stream_options":{"stream":true}}', False),
        (b'{"model":"a","x":"\\"stream\\":true"}', False),
        # Of two, the engines take the last; of two models llama-swap takes the first.
        (b'{"stream":true,"model":"a","stream":false}', False),
        (b'{"stream":false,"model":"a","model":"b","stream":true}', True),
        (b'{"stream":true,"stream":"x","model":"a"}', False),
        # Not to its end, or no JSON: nothing is known.
        (b'{"model":"a","stream":true', None),
        (b'{"model":"a","stream":true,"messages":[', None),
        (b'{"model":"a","stream":true;}', None),
        (b'{"model":"a","stream":truex}', False),
        (b'{"model":5,"stream":true}', None),
        (b'[{"model":"a","stream":true}]', None),
        (b"", None),
    ],
)
def test_the_last_top_level_stream_of_a_whole_object_counts(body: bytes, expected: bool | None) -> None:
    for cuts in ((), range(1, len(body))):
        assert streamed(body, cuts=cuts) is expected
    assert name_of(body) == name_of(body, stream=True)


def test_where_the_model_is_in_the_path_the_body_needs_none() -> None:
    for body in (b'{"stream":true}', b'{"model":5,"stream":true}', b'{"model":"a","stream":true}'):
        assert streamed(body, named=False) is True
    assert stream_reader(b"Application/JSON; charset=utf-8") is not None
    for kind in (None, b"", b"text/plain", MULTIPART):
        assert stream_reader(kind) is None
        assert asks_for_stream(stream_reader(kind)) is None
    assert asks_for_stream(body_reader(MULTIPART, b"", stream=True)) is None
    assert asks_for_stream(body_reader(URLENCODED, b"", stream=True)) is None


def test_who_does_not_ask_is_told_nothing_and_pays_nothing() -> None:
    reader = body_reader(JSON, b"")
    reader.feed(b'{"model":"a","stream":true}')
    assert asks_for_stream(reader) is None


def requests() -> st.SearchStrategy[str]:
    """Objects in which `stream` and `model` are likely, and likely to be what they should be."""
    keys = st.one_of(st.sampled_from(["stream", "model"]), TEXT).flatmap(json_strings)
    values = st.one_of(st.sampled_from(["true", "false", '"a"']), json_values())
    member = st.tuples(SPACE, keys, SPACE, st.just(":"), SPACE, values, SPACE).map("".join)
    return st.lists(member, max_size=6).map(lambda members: "{" + ",".join(members) + "}")


@given(text=st.tuples(SPACE, requests(), SPACE).map("".join), data=st.data(), named=st.booleans())
@settings(max_examples=150, deadline=None)
def test_any_valid_object_asks_for_a_stream_where_the_last_stream_is_true(
    text: str, data: st.DataObject, named: bool
) -> None:
    body = text.encode()
    root = json.loads(text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=6)))
    models = [value for key, value in json.loads(text, object_pairs_hook=list) if key == "model"]
    # An empty name is read well, and refused for what it is.
    readable = not named or first_model(body) is not None or not models or models[0] == ""
    assert streamed(body, cuts=cuts, named=named) is ((root.get("stream") is True) if readable else None)
    assert name_of(body, cuts=cuts, stream=True) == first_model(body)


@pytest.mark.parametrize("size", [1 << 30, 65536, 4093])
def test_a_picture_of_20_mb_is_looked_through_in_linear_time(size: int) -> None:
    picture = b'[{"role":"user","content":[{"image_url":{"url":"data:' + b"A" * 20_000_000 + b'"}}]}]'
    body = b'{"model":"a","messages":' + picture + b',"stream":true}'
    begun = time.process_time()
    assert streamed(body, cuts=range(size, len(body), size)) is True
    assert time.process_time() - begun < 2


TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b"(",
    b'"',
    b":",
    b",",
    b" ",
    b"\\",
    b"\\u0065",
    b'"model"',
    b'"model":"a"',
    b'"mod\\u0065l":"b"',
]
TOKENS += [
    b"true",
    b"nan",
    b"1",
    b"-",
    b"\xff",
    b"\x00",
    b'{"model":"a"}',
    b"&",
    b"=",
    b"%",
    b"%6d",
    b"model=a",
    b";",
    b"\r\n",
    b"\n",
]
TOKENS += [
    b"--B",
    b"--B--",
    b"--B\r\n",
    b'Content-Disposition: form-data; name="model"\r\n\r\n',
    b'name="x"',
    b"a\r\n--B--\r\n",
]
SOUP = st.lists(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=3)), max_size=30).map(b"".join)
TYPES = st.sampled_from(
    [None, b"", JSON, URLENCODED, MULTIPART, b"text/plain", b"multipart/form-data", b"a/b; x=application/json"]
)


@given(body=SOUP, content_type=st.one_of(TYPES, SOUP), query=st.one_of(st.just(b""), SOUP), data=st.data())
@example(body=b'{"x":"\\', content_type=JSON, query=b"", data=None)
@settings(max_examples=150, deadline=None)
def test_any_bytes_give_one_answer_however_they_are_cut(
    body: bytes, content_type: bytes, query: bytes, data: Any
) -> None:
    whole = name_of(body, content_type, query)
    assert name_of(body, content_type, query, cuts=range(1, len(body))) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=4)))
        assert name_of(body, content_type, query, cuts=cuts) == whole
        assert name_of(body, content_type, query, cuts=cuts, stream=True) == whole


# Which reader, and the query


@pytest.mark.parametrize(
    ("content_type", "query", "expected"),
    [
        (b"application/json", b"", "tts-a"),
        (b"application/json", b"model=embed-a", "tts-a"),
        (b"application/json;charset=utf-8", b"", "tts-a"),
        (b"text/plain; was=application/json", b"model=embed-a", "tts-a"),
        (b"multipart/form-data; boundary=application/json", b"model=embed-a", "tts-a"),
        (None, b"", None),
        (None, b"model=embed-a", "embed-a"),
        (b"", b"model=embed-a", "embed-a"),
        (b"text/plain", b"", None),
        (b"text/plain; charset=utf-8", b"model=embed-a", "embed-a"),
        (b"Application/JSON", b"", None),
        (b"Application/JSON", b"model=embed-a", "embed-a"),
        (b"application/vnd.x+json", b"", None),
        (b"application/vnd.x+json", b"model=embed-a", "embed-a"),
        # Only this spelling makes llama-swap open the parts.
        (b"Multipart/Form-Data; boundary=B", b"model=embed-a", "embed-a"),
        (b"multipart/mixed; boundary=B", b"model=embed-a", "embed-a"),
        # Go refuses what it cannot parse, whatever the query says.
        (b"text/", b"model=embed-a", None),
        (b"text/plain; charset", b"model=embed-a", None),
        (b"text/plain, text/html", b"model=embed-a", None),
        (b"text/plain; a=1; a=2", b"model=embed-a", None),
        (b"text/plain; x=multipart/form-data", b"model=embed-a", None),
    ],
)
def test_case_63_the_content_type_decides_as_in_llama_swap(
    content_type: bytes | None, query: bytes, expected: str | None
) -> None:
    assert name_of(b'{"model":"tts-a"}', content_type, query) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (b"model=tts-a", "tts-a"),
        (b"x=1&model=tts-a&y", "tts-a"),
        (b"&&model=tts-a&", "tts-a"),
        (b"mod%65l=org%2Fa+b", "org/a b"),
        (b"model=%E2%82%AC", "€"),
        (b"model=a=b", "a=b"),
        (b"", None),
        (b"model", None),
        (b"model=", None),
        (b"Model=tts-a", None),
        (b"model=tts-a&model=tts-a", None),
        (b"model=tts-a&mod%65l=embed-a", None),
        (b"model=tts-a;x=1", None),
        (b"model=tts-a&x=%zz", None),
        (b"model=tts-a&x=%4", None),
        (b"model=%FF", None),
        (b"model=tts-a#x", None),
        (b"model=tts a", None),
        (b"model=" + b"y" * 1025, None),
        (b"model=tts-a" + b"&" * 10_000, None),
    ],
)
def test_a_query_names_a_model_once_or_not_at_all(query: bytes, expected: str | None) -> None:
    try:
        name: str | None = name_from_query(query)
    except Undecidable:
        name = None
    assert name == expected
    assert name_of(b"", None, query) == expected
    assert name_of(b'{"model":"embed-a"}', JSON, query, method="GET") == expected


def test_head_reads_json_and_multipart_bodies_but_no_urlencoded_one() -> None:
    assert name_of(b'{"model":"tts-a"}', JSON, b"model=embed-a", method="HEAD") == "tts-a"
    assert name_of(multipart(field(b"tts-a")), MULTIPART, b"", method="HEAD") == "tts-a"
    assert name_of(b"model=tts-a", URLENCODED, b"model=embed-a", method="HEAD") == "embed-a"


# Forms


@pytest.mark.parametrize(
    ("body", "query", "expected"),
    [
        (b"model=tts-a", b"", "tts-a"),
        (b"input=hi+there&model=tts%2Da&voice=x", b"", "tts-a"),
        (b"%6d%6F%64%65%6c=tts-a", b"x=1", "tts-a"),
        (b"input=\xc3\xa9&model=tts-a", b"", "tts-a"),
        (b"input=1", b"model=tts-a", "tts-a"),
        (b"model=" + b"%79" * 1024, b"", "y" * 1024),
        (b"model=" + b"%79" * 1025, b"", None),
        (b"model=tts-a", b"model=tts-a", None),
        (b"model=tts-a&model=embed-a", b"", None),
        (b"model&model=embed-a", b"", None),
        (b"model=tts-a;model=embed-a", b"", None),
        (b"input=a;b&model=tts-a", b"", None),
        (b"input=%&model=tts-a", b"", None),
        (b"input=%4&model=tts-a", b"", None),
        (b"model=tts-a&input=%4", b"", None),
        (b"model=tts-a", b"x=%", None),
        (b"model=%ff", b"", None),
        (b"model=tts-a" + b"&" * 10_000, b"", None),
        (b"model=tts-a&x=" + b"y" * (10 << 20), b"", None),
        (b'{"model":"tts-a"}', b"", None),
    ],
)
def test_an_urlencoded_form_names_a_model_once_or_not_at_all(body: bytes, query: bytes, expected: str | None) -> None:
    assert name_of(body, URLENCODED + b"; charset=UTF-8", query) == expected
    if len(body) < 10_000:
        assert name_of(body, URLENCODED, query, cuts=range(1, len(body))) == expected


def field(value: bytes, name: bytes = b'"model"', after: bytes = b"", headers: bytes = b"") -> bytes:
    return b"Content-Disposition: form-data; name=" + name + after + b"\r\n" + headers + b"\r\n" + value


def multipart(*parts: bytes) -> bytes:
    return b"".join(b"--B\r\n" + part + b"\r\n" for part in parts) + b"--B--\r\n"


FILE = field(b"\x00--B\r\n--\r\nmodel", b'"file"', b'; filename="a.wav"', b"Content-Type: audio/wav\r\n")
MODEL = field(b"tts-a")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(multipart(MODEL), id="alone"),
        pytest.param(multipart(MODEL, FILE), id="before a file"),
        pytest.param(multipart(FILE, MODEL), id="after a file"),
        pytest.param(multipart(FILE, MODEL, field(b"", b'"language"'))[:-2], id="no last line end"),
        pytest.param(multipart(field(b"tts-a", b"model")), id="unquoted, as .NET writes it"),
        pytest.param(
            multipart(field(b"tts-a", headers=b"Content-Type: text/plain; charset=utf-8\r\n")),
            id="typed, as aiohttp writes it",
        ),
        pytest.param(
            multipart(field(b"tts-a", headers=b"Content-Length: 5\r\n")), id="with its length, as OkHttp writes it"
        ),
        pytest.param(
            multipart(field(b"tts-a", headers=b"content-transfer-encoding: 8BIT\r\n")), id="8bit, as Apache writes it"
        ),
        pytest.param(
            multipart(b'content-disposition:Form-Data;NAME="model" ; \r\n\r\ntts-a'), id="odd case and spaces"
        ),
        pytest.param(multipart(field(b"x", b'"f"', b'; filename="\xc3\xa9.wav"'), MODEL), id="file name in UTF-8"),
        pytest.param(
            multipart(field(b"x", b'"f"', b"; filename=a; filename*=UTF-8''%e2%82%ac"), MODEL), id="extended file name"
        ),
        pytest.param(
            multipart(field(b"x", b'"f"', b'; filename="C:\\a\\\\b\\"; name=\\"model"'), MODEL),
            id="backslashes in a file name",
        ),
        pytest.param(
            multipart(field(b"x", b'"Model"'), field(b"x", b'" model"'), field(b"x", b'"\xc3\xa9"'), MODEL),
            id="other names",
        ),
    ],
)
@pytest.mark.parametrize("content_type", [MULTIPART, b'multipart/form-data;charset=utf-8; boundary="B";'])
def test_a_multipart_form_as_clients_write_it_names_its_model(body: bytes, content_type: bytes) -> None:
    assert name_of(body, content_type) == "tts-a"
    assert name_of(body, content_type, cuts=range(1, len(body))) == "tts-a"
    assert name_of(body, content_type, b"model=tts-a") is None


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(multipart(MODEL, MODEL), id="twice"),
        pytest.param(multipart(MODEL, field(b"embed-a", b"model")), id="twice, differently"),
        pytest.param(multipart(FILE), id="missing"),
        pytest.param(multipart(), id="no parts"),
        pytest.param(multipart(field(b"")), id="empty"),
        pytest.param(multipart(field(b"y" * 1025)), id="too long"),
        pytest.param(multipart(field(b"\xff")), id="not UTF-8"),
        pytest.param(multipart(field(b"tts-a", after=b'; filename="m"')), id="a file"),
        pytest.param(multipart(field(b"tts-a", after=b'; filename=""')), id="a file without a name"),
        pytest.param(multipart(field(b"tts-a", after=b"; filename*=UTF-8''m")), id="a file with an extended name"),
        pytest.param(multipart(field(b"tts-a", headers=b"Content-Transfer-Encoding: base64\r\n")), id="base64"),
        pytest.param(
            multipart(field(b"x", b'"f"', headers=b"Content-Transfer-Encoding: quoted-printable\r\n"), MODEL),
            id="quoted-printable beside it",
        ),
        pytest.param(multipart(field(b"embed-a", after=b"; name*=utf-8''x")), id="extended name"),
        pytest.param(multipart(field(b"embed-a", b'"mo"', b'; name*0="model"'), MODEL), id="continued name"),
        pytest.param(multipart(field(b"embed-a", after=b'; name="model"')), id="two names"),
        pytest.param(multipart(field(b"embed-a", b'"mod\\el"'), MODEL), id="backslash in the name"),
        pytest.param(multipart(field(b"embed-a", b' "model"'), MODEL), id="space before the name"),
        pytest.param(multipart(field(b"embed-a", b'"model" x'), MODEL), id="text after the name"),
        pytest.param(multipart(field(b"embed-a", b'"model'), MODEL), id="open quote"),
        pytest.param(multipart(b'Content-Disposition: attachment; name="model"\r\n\r\ntts-a'), id="not form-data"),
        pytest.param(multipart(b"Content-Type: text/plain\r\n\r\nembed-a", MODEL), id="no disposition"),
        pytest.param(multipart(b"\r\nembed-a", MODEL), id="no headers"),
        pytest.param(multipart(b"Content-Disposition: form-data\r\n\r\nembed-a", MODEL), id="no name"),
        pytest.param(
            multipart(field(b"embed-a", b'"x"', headers=b'Content-Disposition: form-data; name="model"\r\n'), MODEL),
            id="two dispositions",
        ),
        pytest.param(multipart(field(b"embed-a", headers=b" folded: x\r\n")), id="folded header"),
        pytest.param(
            multipart(b'Content-Disposition : form-data; name="model"\r\n\r\nembed-a', MODEL), id="space before a colon"
        ),
        pytest.param(multipart(field(b"embed-a", headers=b"X\r\n")), id="header without a colon"),
        pytest.param(multipart(field(b"embed-a", headers=b"X: \x00\r\n")), id="control character in a header"),
        pytest.param(multipart(field(b"embed-a", headers=b"X: y\nZ: z\r\n")), id="bare line feed in a header"),
        pytest.param(multipart(field(b"embed-a", headers=b"X: " + b"y" * 9000 + b"\r\n")), id="long headers"),
        pytest.param(
            multipart(field(b"embed-a", headers=b"".join(b"X%d: y\r\n" % n for n in range(10)))), id="many headers"
        ),
        pytest.param(multipart(*[field(b"x", b'"x"')] * 1000, MODEL), id="many parts"),
        pytest.param(multipart(MODEL).replace(b"\r\n", b"\n"), id="bare line feeds"),
        pytest.param(multipart(MODEL)[:-4] + b"..\r\n", id="no hyphens after the last boundary"),
        pytest.param(b"--C\r\n" + multipart(MODEL)[5:], id="another boundary first"),
        pytest.param(b"\r\n" + multipart(MODEL), id="empty line first"),
        pytest.param(b"preamble\r\n" + multipart(MODEL), id="preamble"),
        pytest.param(multipart(MODEL) + b"epilogue", id="epilogue"),
        pytest.param(multipart(MODEL)[:-3], id="cut in the last boundary"),
        pytest.param(multipart(MODEL)[:-6], id="no last boundary"),
        pytest.param(multipart(MODEL)[:-1], id="cut in the last line end"),
        pytest.param(b"", id="nothing"),
        pytest.param(multipart(MODEL, FILE).replace(b"--B\r\n", b"--B \r\n"), id="space after a boundary"),
        pytest.param(multipart(field(b"tts-a\r\n--Bx\r\n"), FILE), id="boundary and more"),
        pytest.param(multipart(MODEL, field(b"--B\r\n" + MODEL, b'"x"')), id="boundary right behind the headers"),
    ],
)
def test_a_multipart_form_that_could_be_read_in_two_ways_names_none(body: bytes) -> None:
    assert name_of(body, MULTIPART) is None
    assert name_of(body, MULTIPART, cuts=range(1, len(body))) is None


def test_a_multipart_form_without_model_leaves_it_to_the_query() -> None:
    assert name_of(multipart(FILE), MULTIPART, b"model=tts-a") == "tts-a"
    assert name_of(multipart(), MULTIPART, b"model=tts-a") == "tts-a"
    assert name_of(multipart(FILE), MULTIPART, b"model=tts-a&x=%") is None


@pytest.mark.parametrize(
    "boundary",
    [b"", b'""', b"a b", b'"a b"', b'"a\\"b"', b"x" * 71, b'"\xc3\xa9"', b"B; boundary=B", b"B; boundary*0=C"],
)
def test_an_odd_boundary_is_refused(boundary: bytes) -> None:
    raw = boundary.strip(b'"') or b"B"
    assert name_of(multipart(MODEL).replace(b"--B", b"--" + raw), b"multipart/form-data; boundary=" + boundary) is None


def test_the_media_type_itself_must_be_form_data() -> None:
    assert name_of(multipart(MODEL), b'text/plain; x="multipart/form-data"; boundary=B') is None


def httpx_form() -> tuple[bytes, bytes]:
    files = {"file": ('é "q" \\.wav', b"\r\n--\x00" * 1000, "audio/wav")}
    request = httpx.Request("POST", "http://x", data={"model": "tts-a", "language": "en"}, files=files)
    return request.read(), request.headers["content-type"].encode()


def aiohttp_form() -> tuple[bytes, bytes]:
    form = aiohttp.FormData()
    form.add_field("file", io.BytesIO(b"\r\n--\x00" * 1000), filename='é "q" \\.wav', content_type="audio/wav")
    form.add_field("model", "tts-a")
    payload = form()
    return asyncio.run(payload.as_bytes()), payload.headers["Content-Type"].encode()


def browser_form() -> tuple[bytes, bytes]:
    boundary = b"----WebKitFormBoundary7MA4YWxkTrZu0gW"
    body = multipart(field(b"\x00", b'"file"', b'; filename="\xc3\xa9 %22q%22.wav"'), MODEL)
    return body.replace(b"--B", b"--" + boundary), b"multipart/form-data; boundary=" + boundary


@pytest.mark.parametrize("form", [httpx_form, aiohttp_form, browser_form])
def test_forms_of_real_clients_are_read(form: Callable[[], tuple[bytes, bytes]]) -> None:
    body, content_type = form()
    for size in (1, 7, 65536):
        assert name_of(body, content_type, cuts=range(size, len(body), size)) == "tts-a"


# Cost


def streams() -> Iterator[Any]:
    """What stands before, in and after many equal chunks."""
    yield pytest.param(JSON, b'{"x":"', b"QUJD" * 16384, b'","model":"tts-a"}', id="JSON string")
    yield pytest.param(JSON, b'{"x":[{"y":"', b"QUJD" * 16384, b'"}],"model":"tts-a"}', id="nested JSON string")
    yield pytest.param(JSON, b'{"x":"', b'\\"\\n' * 16384, b'","model":"tts-a"}', id="escapes")
    yield pytest.param(JSON, b'{"', b"k" * 65536, b'":1,"model":"tts-a"}', id="JSON key")
    yield pytest.param(JSON, b'{"x":[', b"[[]],[1,2]," * 1000, b'1],"model":"tts-a"}', id="brackets")
    yield pytest.param(JSON, b'{"model":"tts-a","x":"', b"QUJD" * 16384, b'"}', id="after the name")
    before, after = multipart(MODEL, FILE).rsplit(b"\x00", 1)
    yield pytest.param(MULTIPART, before, b"\r\n--\r\n-B" * 8192, after, id="file after the model")
    before, after = multipart(FILE, MODEL).split(b"\x00", 1)
    yield pytest.param(MULTIPART, before, b"\r\n--\r\n-B" * 8192, after, id="file before the model")
    yield pytest.param(URLENCODED, b"x=", b"%20y" * 16384, b"&model=tts-a", id="urlencoded")


def fed(content_type: bytes, before: bytes, chunk: bytes, count: int, after: bytes) -> str:
    reader = body_reader(content_type, b"")
    reader.feed(before)
    for _ in range(count):
        reader.feed(chunk)
    reader.feed(after)
    return reader.finish()


@pytest.mark.parametrize(("content_type", "before", "chunk", "after"), list(streams()))
def test_memory_does_not_grow_with_the_body(content_type: bytes, before: bytes, chunk: bytes, after: bytes) -> None:
    tracemalloc.start()
    try:
        assert fed(content_type, before, chunk, 100, after) == "tts-a"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * len(chunk)


@pytest.mark.parametrize(
    ("content_type", "before", "after"),
    [(JSON, b'{"model":"', b'"}'), (URLENCODED, b"model=", b""), (MULTIPART, multipart(MODEL)[:-9], b"\r\n--B--\r\n")],
)
def test_memory_does_not_grow_with_the_name(content_type: bytes, before: bytes, after: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Undecidable, match="longer than"):
            fed(content_type, before, b"y" * 65536, 100, after)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(("content_type", "before", "chunk", "after"), list(streams()))
def test_time_grows_with_the_body_and_no_faster(content_type: bytes, before: bytes, chunk: bytes, after: bytes) -> None:
    def seconds(count: int) -> float:
        start = time.process_time()
        assert fed(content_type, before, chunk, count, after) == "tts-a"
        return time.process_time() - start

    short = min(seconds(10) for _ in range(3))
    assert min(seconds(100) for _ in range(2)) < 40 * max(short, 0.002)
