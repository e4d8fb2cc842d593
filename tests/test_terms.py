"""On what terms a request waits: who is whose retry, and what is believed of a client's patience."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from proxy.inbound import Inbound
from proxy.terms import read_terms

DIGEST = b"d" * 32


def inbound(*fields: tuple[bytes, bytes], **changes: Any) -> Inbound:
    request = Inbound("POST", b"/v1/chat/completions", b"a=1", list(fields), "192.0.2.1", "http")
    return dataclasses.replace(request, **changes)


def identity(request: Inbound, client: str = "somebody", digest: bytes = DIGEST) -> bytes:
    found = read_terms(request, client, digest).identity
    assert found is not None
    return found


def test_key_or_address_method_path_query_and_body_make_a_request_what_it_is() -> None:
    others = [
        identity(inbound(), client="else"),
        identity(inbound(), digest=b"e" * 32),
        identity(inbound(method="PUT")),
        identity(inbound(raw_path=b"/v1/chat/completions/")),
        identity(inbound(query=b"a=2")),
        identity(inbound(query=b"")),
        identity(inbound(raw_path=b"/v1/chat/completionsa=1", query=b"")),
        identity(inbound(raw_path=b"/v1/chat/completion", query=b"sa=1")),
    ]
    assert len({identity(inbound()), *others}) == len(others) + 1


def test_no_other_field_counts() -> None:
    fields = [
        (b"x-stainless-retry-count", b"2"),
        (b"x-stainless-read-timeout", b"5"),
        (b"content-type", b"text/plain"),
        (b"user-agent", b"b"),
        (b"prefer", b"wait=3"),
        (b"date", b"now"),
        (b"x-request-id", b"7"),
    ]
    assert {identity(inbound(field)) for field in fields} == {identity(inbound())}
    assert identity(inbound(peer="192.0.2.2", scheme="https")) == identity(inbound())


def test_only_a_digest_is_kept() -> None:
    assert len(identity(inbound(raw_path=b"/" + b"x" * 5000), "key-secret")) == 32


def test_any_address_that_a_proxy_reports_will_do() -> None:
    assert identity(inbound(), "\udcff\xff") != identity(inbound(), "\xff")


@pytest.mark.parametrize(
    ("read", "total", "seconds"),
    [
        (None, None, None),
        (b"5", None, 5.0),
        (b"600.0", b"30", 600.0),
        (None, b"300", 300.0),
        (b"NOT_GIVEN", b"300", 300.0),
        (b"NOT_GIVEN", None, None),
        (b"None", b"", None),
        (b"0", b"0.0", None),
        (b"-1", None, None),
        (b"inf", b"nan", None),
        (b"1e400", b"9" * 400, None),
        (b"1_0", b"\xb2", None),
        (b" 5", b"5s", None),
    ],
)
def test_what_an_sdk_says_of_its_timeout(read: bytes | None, total: bytes | None, seconds: float | None) -> None:
    names = ((b"x-stainless-read-timeout", read), (b"x-stainless-timeout", total))
    given = [(name, value) for name, value in names if value is not None]
    assert read_terms(inbound(*given), "", DIGEST).client_timeout == seconds


@pytest.mark.parametrize(
    ("value", "attempt"), [(None, 0), (b"0", 0), (b"3", 3), (b"", 0), (b"-1", 0), (b"x", 0), (b"9" * 7, 0)]
)
def test_how_often_an_sdk_says_to_have_sent_it_before(value: bytes | None, attempt: int) -> None:
    fields = [] if value is None else [(b"x-stainless-retry-count", value)]
    assert read_terms(inbound(*fields), "", DIGEST).attempt == attempt


def test_the_preferred_wait_is_a_term() -> None:
    assert read_terms(inbound((b"prefer", b"respond-async, wait=7")), "", DIGEST).wait == 7
    assert read_terms(inbound(), "", DIGEST).wait is None
