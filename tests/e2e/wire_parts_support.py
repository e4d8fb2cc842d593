"""Parts of HTTP messages at random, used up to the edges of what RFC 9110 and 9112 allow.

Everything comes from one `random.Random`, so that a seed is a test: odd names, values of Latin-1 and of nothing with
whitespace around them, escapes of every kind, chunks with extensions, trailers.
"""

from __future__ import annotations

from random import Random

Fields = list[tuple[bytes, bytes]]

TOKEN_CHARACTERS = b"!#$%&'*+-.^_`|~09azAZ"
PATH_CHARACTERS = b"abzAZ09-._~!$&'()*+,;=:@[]\"<>\\^`{}|"
QUERY_CHARACTERS = PATH_CHARACTERS + b"/?%#"


def path(random: Random, *, odd: bool = True) -> bytes:
    """Some segments, with escapes; without `odd`, none that are empty or dots, and no escaped slash."""
    text = b""
    for _ in range(random.randint(0, 3)):
        text += b"/" + bytes(random.choices(PATH_CHARACTERS, k=random.randint(0, 6)))
        if random.random() < 0.5:
            text += random.choice((b"%2F", b"%2f", b"%20", b"%7E", b"%00", b"%ff", b"%C3%A9", b"%2e%2E"))
        if random.random() < 0.1:
            text += random.choice((b"//", b"/.", b"/..", b"/./"))
    if not odd:
        text = text.replace(b"%2F", b"").replace(b"%2f", b"").replace(b".", b"").replace(b"%2e%2E", b"")
        while b"//" in text:
            text = text.replace(b"//", b"/")
    return text.removesuffix(b"/") if not odd else text


def query(random: Random) -> bytes:
    """Nothing, or a query, which may be empty."""
    if random.random() < 0.5:
        return b""
    return b"?" + bytes(random.choices(QUERY_CHARACTERS, k=random.choice((0, 1, 5, 30))))


def name(random: Random, known: tuple[bytes, ...]) -> bytes:
    """The name of a field that means nothing to a proxy."""
    if random.random() < 0.6:
        return random.choice(known)
    return b"x" + bytes(random.choices(TOKEN_CHARACTERS, k=random.randint(1, 12)))


def value(random: Random) -> bytes:
    """The value of a field with the whitespace around it: anything but control characters."""
    words = []
    for _ in range(random.choice((0, 1, 1, 2, 4))):
        words.append(bytes(random.choices(range(0x21, 0x7F), k=random.randint(1, 12))))
        if random.random() < 0.2:
            words.append(bytes(random.choices(range(0x80, 0x100), k=random.randint(1, 6))))
    return (
        random.choice((b"", b" ", b" \t "))
        + random.choice((b" ", b"  ", b"\t", b",")).join(words)
        + random.choice((b"", b"", b" ", b"\t "))
    )


def payload(random: Random) -> bytes:
    """The content of a body: mostly small, now and then larger than a buffer, or than what is kept in memory."""
    size = random.choices((0, 1, random.randrange(2000), 70_000, 1_200_000), weights=(10, 10, 70, 9, 1))[0]
    return random.randbytes(size)


def chunks(random: Random, content: bytes) -> bytes:
    """`content` in chunks with extensions, up to the size of the last one."""
    wire, at = b"", 0
    while at < len(content):
        size = random.choice((1, 7, 1000, len(content))) if len(content) < 5000 else 50_000
        piece = content[at : at + size]
        number = random.choice((b"%x", b"%X", b"00%x")) % len(piece)
        wire += number + random.choice((b"", b"", b";a", b";a=b", b';a="b c"')) + b"\r\n" + piece + b"\r\n"
        at += size
    return wire + random.choice((b"0", b"000", b"0;last"))


def trailer_section(trailers: Fields) -> bytes:
    """What follows the size of the last chunk."""
    return b"\r\n" + b"".join(name + b":" + value + b"\r\n" for name, value in trailers) + b"\r\n"
