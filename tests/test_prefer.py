"""The Prefer field, as RFC 7240 writes it."""

from __future__ import annotations

import pytest

from proxy.prefer import Preferences, read_preferences


@pytest.mark.parametrize(
    ("values", "wait", "respond_async"),
    [
        ([], None, False),
        ([b"wait=10"], 10, False),
        ([b"respond-async"], None, True),
        ([b"respond-async, wait=10"], 10, True),
        ([b"wait=10", b"respond-async"], 10, True),
        ([b"Wait = 7"], 7, False),
        ([b'wait="7"'], 7, False),
        ([b"wait=0"], 0, False),
        ([b"wait=5, wait=9"], 5, False),
        ([b"respond-async; why=not, wait=3; q"], 3, True),
        ([b'note="wait=9, respond-async", lenient'], None, False),
        ([b"wait"], None, False),
        ([b"wait=soon"], None, False),
        ([b"wait=-1"], None, False),
        ([b"wait=1.5"], None, False),
        ([b"wait=" + b"9" * 50], 999999999, False),
        ([b"respond-asynchronously"], None, False),
        ([b",,, wait=2,"], 2, False),
    ],
)
def test_what_a_client_prefers(values: list[bytes], wait: int | None, respond_async: bool) -> None:
    assert read_preferences([(b"prefer", value) for value in values]) == Preferences(wait, respond_async)


def test_only_the_field_itself_counts() -> None:
    assert read_preferences([(b"x-prefer", b"wait=1"), (b"preference-applied", b"wait=1")]) == Preferences()
