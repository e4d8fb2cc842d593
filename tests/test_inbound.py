"""What is read from a request before anything is decided."""

from __future__ import annotations

from base64 import b64encode
from ipaddress import ip_network
from typing import Any

import pytest

from proxy.errors import AmbiguousHeader, BadTarget, Unauthorized
from proxy.inbound import Inbound, Keys, RawHeaders, Trust, credential, read_scope

HOST = (b"host", b"test")


def scope(target: bytes = b"/x", *headers: tuple[bytes, bytes], version: str = "1.1", **changes: Any) -> dict[str, Any]:
    """A scope as the server makes it."""
    raw_path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "method": "POST",
        "http_version": version,
        "scheme": "http",
        "raw_path": raw_path,
        "query_string": query,
        "headers": [HOST, *headers],
        "client": ("10.0.0.1", 1234),
        **changes,
    }


def inbound(*headers: tuple[bytes, bytes], peer: str = "10.0.0.1") -> Inbound:
    return read_scope(scope(b"/x", *headers, client=(peer, 1)))


# --- the target


@pytest.mark.parametrize("target", [b"/", b"/a%2fb?c=%7E&d", b"//a/../b;c", b"/x?a?b", b'/"<>?"<>'])
def test_the_target_is_put_together_again_byte_for_byte(target: bytes) -> None:
    assert read_scope(scope(target)).target == target


@pytest.mark.parametrize(
    ("target", "path", "host"),
    [
        (b"http://llm.home:8080/a%2fb?c", b"/a%2fb?c", b"llm.home:8080"),
        (b"HTTPS://llm.home/a", b"/a", b"llm.home"),
        (b"http://llm.home", b"/", b"llm.home"),
        (b"http://llm.home?c", b"/?c", b"llm.home"),
        (b"http://[::1]:80//a", b"//a", b"[::1]:80"),
    ],
)
def test_a_target_in_absolute_form_gives_path_and_host(target: bytes, path: bytes, host: bytes) -> None:
    request = read_scope(scope(target, (b"x", b"y")))
    assert request.target == path
    assert request.headers == [(b"host", host), (b"x", b"y")]


@pytest.mark.parametrize(
    "target",
    [b"*", b"", b"x", b"llm.home:80", b"http:/x", b"http:///x", b"http://", b"http://u:p@h/x", b"ftp://h/x", b"://h/x"],
)
def test_a_target_that_is_no_path_is_refused(target: bytes) -> None:
    with pytest.raises(BadTarget):
        read_scope(scope(target))


@pytest.mark.parametrize(
    ("headers", "version"),
    [([], "1.1"), ([HOST, HOST], "1.1"), ([HOST, (b"host", b"other")], "1.1"), ([HOST, HOST], "1.0")],
)
def test_a_request_has_one_host(headers: RawHeaders, version: str) -> None:
    with pytest.raises(BadTarget, match="exactly one Host"):
        read_scope(scope(headers=headers, version=version))


@pytest.mark.parametrize(
    "codings", [[b"gzip, chunked"], [b"chunked", b"chunked"], [b"chunked", b"identity"], [b"identity"], [b"xchunked"]]
)
def test_a_body_is_chunked_once_or_not_coded(codings: list[bytes]) -> None:
    with pytest.raises(AmbiguousHeader, match="chunked, once"):
        inbound(*((b"transfer-encoding", coding) for coding in codings))
    inbound((b"transfer-encoding", b" Chunked"))


def test_a_request_of_http_1_0_may_have_none() -> None:
    assert read_scope(scope(headers=[], version="1.0")).headers == []


def test_a_peer_without_an_address_has_none() -> None:
    assert read_scope(scope(client=None)).peer == ""


# --- fields


def test_whitespace_around_a_value_is_no_part_of_it() -> None:
    request = inbound((b"content-length", b" 2\t"), (b"x", b"\t a  b "), (b"y", b" "))
    assert request.content_length() == 2
    assert request.headers == [HOST, (b"content-length", b"2"), (b"x", b"a  b"), (b"y", b"")]


def test_the_headers_are_those_of_the_moment() -> None:
    """A server may go on to fill the list with what comes after the body."""
    given = [HOST]
    request = read_scope(scope(headers=given))
    given.append((b"content-type", b"x"))
    assert request.headers == [HOST]


def test_the_first_value_counts() -> None:
    request = inbound((b"x", b"1"), (b"x", b"2"))
    assert request.first(b"x") == b"1"
    assert request.first(b"y") is None


@pytest.mark.parametrize("value", [b"a, Chunked", b"chunked", b" CHUNKED ,b"])
def test_a_list_has_its_members_whatever_their_case(value: bytes) -> None:
    assert inbound((b"x", b"z"), (b"x", value)).has(b"x", b"chunked")
    assert not inbound((b"x", b"xchunked"), (b"y", b"chunked")).has(b"x", b"chunked")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ([(b"connection", b"Upgrade"), (b"upgrade", b"WebSocket")], True),
        ([(b"connection", b"keep-alive, upgrade"), (b"upgrade", b"h2c, websocket")], True),
        ([(b"connection", b"upgrade"), (b"upgrade", b"h2c")], False),
        ([(b"upgrade", b"websocket")], False),
        ([(b"connection", b"upgrade")], False),
    ],
)
def test_a_websocket_is_asked_for_by_two_fields(fields: RawHeaders, wanted: bool) -> None:
    assert inbound(*fields).wants_websocket is wanted


@pytest.mark.parametrize("name", [b"authorization", b"content-type", b"content-length"])
def test_a_field_that_decides_has_one_value(name: bytes) -> None:
    inbound((name, b"1"), (name, b"1")).check_fields()
    with pytest.raises(AmbiguousHeader, match=name.decode()):
        inbound((name, b"1"), (name, b"2")).check_fields()


@pytest.mark.parametrize(
    ("value", "length"), [(b"0", 0), (b"17", 17), (b"017", 17), (b"+1", None), (b"", None), (b"1,1", None)]
)
def test_the_announced_length(value: bytes, length: int | None) -> None:
    assert inbound((b"content-length", value)).content_length() == length
    assert inbound().content_length() is None


# --- keys


def authorization(value: str) -> tuple[bytes, bytes]:
    return (b"authorization", value.encode())


def basic(text: str) -> tuple[bytes, bytes]:
    return authorization("Basic " + b64encode(text.encode()).decode())


X = (b"x-api-key", b"x")


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ([], ""),
        ([X], "x"),
        ([authorization("Bearer b")], "b"),
        ([authorization("bEARER b"), X], "b"),
        ([authorization("Bearer b c")], "b c"),
        ([authorization("Bearer "), X], "x"),
        ([authorization("Bearer"), X], "x"),
        ([authorization("Digest b"), X], "x"),
        ([basic("user:p")], "p"),
        ([basic("user:p:q"), X], "p:q"),
        ([basic(":p")], "p"),
        ([basic("p:"), X], "x"),
        ([basic("p"), X], "x"),
        ([basic("")], ""),
        ([authorization("Basic !"), X], "x"),
        ([authorization("Basic cDpx=x"), X], "x"),
        ([authorization("Bearer b"), basic("user:p")], "b"),
    ],
)
def test_a_credential_is_read_as_llama_swap_reads_it(fields: RawHeaders, found: str) -> None:
    assert credential(inbound(*fields)) == found


def test_a_key_is_found_whole_or_not_at_all() -> None:
    keys = Keys(["one", "zwei-ä", "three"])
    names = {keys.check(inbound((b"x-api-key", key.encode()))) for key in ("one", "zwei-ä", "three")}
    assert len(names) == 3
    assert all(name.startswith("key-") and "one" not in name for name in names)
    assert keys.check(inbound((b"x-api-key", b"one"))) in names
    for wrong in (b"", b"on", b"onee", b"One", b"one\xff", b"zwei-\xe4"):
        with pytest.raises(Unauthorized):
            keys.check(inbound((b"x-api-key", wrong)))
    with pytest.raises(Unauthorized):
        keys.check(inbound())


def test_every_key_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[bytes]()

    def compare_digest(left: bytes, right: bytes) -> bool:
        assert len(left) == len(right)
        compared.append(left)
        return left == right

    monkeypatch.setattr("proxy.inbound.hmac.compare_digest", compare_digest)
    keys = Keys(["one", "another", "three"])
    keys.check(inbound((b"x-api-key", b"one")))
    assert len(compared) == 3


def test_no_key_is_no_key() -> None:
    assert not Keys([])
    assert not Keys([""])
    assert Keys(["a"])
    with pytest.raises(Unauthorized):
        Keys(["", "a"]).check(inbound())


# --- who the client is

TRUST = Trust([ip_network("127.0.0.0/8"), ip_network("10.0.0.0/8"), ip_network("::1/128")])


@pytest.mark.parametrize(
    ("address", "trusted"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:10.1.2.3", True),
        ("::ffff:192.168.1.1", False),
        ("192.168.1.1", False),
        ("fe80::1%eth0", False),
        ("", False),
        ("unix:", False),
        ("10.0.0.1:80", False),
    ],
)
def test_who_is_trusted(address: str, trusted: bool) -> None:
    assert TRUST.trusts(address) is trusted


@pytest.mark.parametrize(
    ("peer", "hops", "client"),
    [
        ("1.1.1.1", [], "1.1.1.1"),
        ("1.1.1.1", [b"2.2.2.2"], "1.1.1.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [b"2.2.2.2"], "2.2.2.2"),
        ("10.0.0.1", [b"evil, 2.2.2.2"], "2.2.2.2"),
        ("10.0.0.1", [b"evil", b"2.2.2.2"], "2.2.2.2"),
        ("10.0.0.1", [b"2.2.2.2, 10.0.0.9"], "2.2.2.2"),
        ("10.0.0.1", [b"10.0.0.8, 10.0.0.9"], "10.0.0.8"),
        ("10.0.0.1", [b"2.2.2.2, "], "10.0.0.1"),
        ("10.0.0.1", [b"what is this"], "what is this"),
    ],
)
def test_the_client_is_the_nearest_for_whom_no_trusted_proxy_speaks(peer: str, hops: list[bytes], client: str) -> None:
    request = inbound(*((b"x-forwarded-for", hop) for hop in hops), peer=peer)
    assert TRUST.client_address(request) == client


def test_forwarded_fields_of_a_trusted_peer_are_continued_and_all_others_replaced() -> None:
    fields = [
        (b"x-forwarded-for", b"1.1.1.1"),
        (b"x-forwarded-for", b"2.2.2.2"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-host", b"llm.example"),
    ]
    names = [b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host"]
    continued = [b"1.1.1.1, 2.2.2.2, 10.0.0.1", b"https", b"llm.example"]
    assert TRUST.forwarded(inbound(*fields)) == list(zip(names, continued, strict=True))
    replaced = [b"9.9.9.9", b"http", b"test"]
    assert TRUST.forwarded(inbound(*fields, peer="9.9.9.9")) == list(zip(names, replaced, strict=True))
    begun = [b"10.0.0.1", b"http", b"test"]
    assert TRUST.forwarded(inbound()) == list(zip(names, begun, strict=True))
