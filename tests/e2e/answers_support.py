"""Random answers to random requests, and what happens on one connection of a client."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from requests_support import Request, request
from wire_parts_support import Fields, chunks, name, payload, trailer_section, value

ANSWER_NAMES = (
    *(b"Set-Cookie", b"set-cookie", b"Link", b"Vary", b"Server", b"Date", b"ETag", b"Cache-Control", b"Location"),
    *(b"WWW-Authenticate", b"Retry-After", b"X-Odd", b"x-odd", b"x_y", b"0", b"Content-Encoding", b"Content-Language"),
)
STATUSES = (*[200] * 8, 201, 202, 204, 205, 206, 299, 301, 304, 307, 400, 401, 404, 418, 429, 451, 500, 502, 503, 599)

FLAWED_ANSWERS = {
    "no answer": b"",
    "ends in its head": b"HTTP/1.1 200 OK\r\nX-Odd: a",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "status above 599": b"HTTP/1.1 600 x\r\nContent-Length: 0\r\n\r\n",
    "status of four digits": b"HTTP/1.1 2000 x\r\nContent-Length: 0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a length that is none": b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\nab",
    "a control character in a value": b"HTTP/1.1 200 OK\r\nX-Odd: a\x00b\r\nContent-Length: 0\r\n\r\n",
    "an upgrade that nobody asked for": b"HTTP/1.1 101 x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
}
"""Bytes after which the connection closes, and why they are no usable answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer on the wire, and whether the connection ends with it; `flaw` says why it must become a 502."""

    wire: bytes
    closes: bool = False
    broken: bool = False
    """Whether its body is shorter than announced."""
    flaw: str | None = None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What happens on one connection: requests, all at once or one after the other, and the answer to each."""

    requests: list[Request]
    answers: list[Answer]
    pipelined: bool
    cuts: list[int] = field(default_factory=list)
    """Where the bytes of the requests are cut into pieces, if they are pipelined."""


def dialogue(random: Random, first: int, flaws: tuple[str, ...]) -> Dialogue:
    """One to five requests; the last may have one of the `flaws`."""
    pipelined = random.random() < 0.5
    requests, answers = list[Request](), list[Answer]()
    for number in range(first, first + random.randint(1, 5)):
        flaw = random.choice(flaws) if random.random() < 0.12 else None
        requests.append(request(random, number, flaw=flaw, may_hold_back=not pipelined))
        answers.append(answer(random, requests[-1]))
        if requests[-1].last or answers[-1].broken:
            break
    size = sum(len(each.head) + len(each.body) for each in requests)
    cuts = sorted(random.randrange(size) for _ in range(random.choice((0, 0, 1, 3))))
    return Dialogue(requests, answers, pipelined, cuts)


def answer(random: Random, asked: Request) -> Answer:
    """An answer to `asked`."""
    if random.random() < 0.03:
        flaw = random.choice(list(FLAWED_ANSWERS))
        return Answer(FLAWED_ANSWERS[flaw], closes=True, flaw=flaw)
    status = random.choice(STATUSES)
    content = b"" if status in {204, 304} or asked.is_head else payload(random)
    fields: Fields = [(name(random, ANSWER_NAMES), value(random)) for _ in range(random.randint(0, 8))]
    fields.append((b"Content-Type", random.choice((b" application/json", b" text/event-stream", b"text/plain"))))
    fields += random.choice(([], [], [], [(b"X-Accel-Buffering", b" yes")], [(b"Keep-Alive", b" timeout=5")]))
    fields += random.choice(([], [], [], [(b"Connection", b" x-two, X-ODD"), (b"X-Two", b" 1")]))
    frame = random.choice(("length", "chunked", "close"))
    if frame == "length" and status != 204:
        announced = len(content) or (random.choice((0, 1000)) if asked.is_head or status == 304 else 0)
        fields.append((b"Content-Length", b" %d" % announced))
    elif frame == "chunked" and status not in {204, 304}:
        fields.append((b"Transfer-Encoding", b" chunked"))
    closes = frame == "close" or random.random() < 0.2
    if closes:  # to close unannounced is a fault, and the next request on that connection may meet it
        fields.append((b"Connection", b" close"))
    random.shuffle(fields)
    version = b"1.1" if frame == "chunked" or random.random() < 0.8 else b"1.0"
    reason = random.choice((b" OK", b" ", b" Odd \xe9 Reason"))
    lines = [b"HTTP/%b %d%b" % (version, status, reason), *(name + b":" + value for name, value in fields), b"", b""]
    interim = random.choice((b"", b"", b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"))
    head = interim + b"\r\n".join(lines)
    if status in {204, 304} or asked.is_head:
        return Answer(head, closes)
    return _with_body(random, head, content, frame, closes=closes)


def _with_body(random: Random, head: bytes, content: bytes, frame: str, *, closes: bool) -> Answer:
    if frame == "chunked":
        trailers: Fields = [(name(random, ANSWER_NAMES), value(random)) for _ in range(random.choice((0, 0, 2)))]
        content = chunks(random, content) + trailer_section(trailers)
    broken = frame != "close" and len(content) > 10 and random.random() < 0.04
    if broken:
        content = content[: len(content) // 2]
    return Answer(head + content, closes=broken or closes, broken=broken)
