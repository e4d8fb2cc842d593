"""A scripted model server, for a real llama-swap to start and to stop.

    python model_server.py q27 18601 DIRECTORY

DIRECTORY/q27.json says how it behaves, and is read again whenever that matters: {"load": 0.6, "work": 0.1, "chunks":
10, "interval": 0.1, "hold": false}. `/health` answers 503 until the load is over; every POST is answered with so many
chunks, of which the last is kept back while "hold" is true. What happened goes as JSON lines into DIRECTORY/journal:
the server "started", a request "arrived", gave its "first byte" and "finished", each with the time since the epoch and
the request's User-Agent as its tag.

It uses nothing but the standard library, for it is started again for every load.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HELD_POLL = 0.01


class ModelServer(ThreadingHTTPServer):
    """One model's server."""

    request_queue_size = 128

    def __init__(self, model: str, port: int, directory: Path) -> None:
        self._model = model
        self._script = directory / f"{model}.json"
        self._journal = os.open(directory / "journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.note("started")
        self.ready = time.monotonic() + self.script["load"]
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def script(self) -> dict[str, Any]:
        """How to behave now."""
        script: dict[str, Any] = json.loads(self._script.read_bytes())
        return script

    def note(self, event: str, tag: str = "") -> None:
        """Write one line, in one piece, since all servers share the file."""
        line = {"event": event, "model": self._model, "tag": tag, "at": time.time()}
        os.write(self._journal, json.dumps(line).encode() + b"\n")


class Handler(BaseHTTPRequestHandler):
    """One connection of llama-swap's."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ModelServer

    def do_GET(self) -> None:
        """Whether the model is loaded."""
        self.send_response(200 if time.monotonic() >= self.server.ready else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        """Work, then chunk by chunk."""
        tag = self.headers.get("User-Agent", "")
        self.server.note("arrived", tag)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            self._answer(tag)
        except ConnectionError:
            self.server.note("finished", tag)

    def _answer(self, tag: str) -> None:
        server, script = self.server, self.server.script
        time.sleep(script["work"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if "chat" in self.path else "application/octet-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        server.note("first byte", tag)
        for number in range(1, script["chunks"] + 1):
            if number > 1:
                time.sleep(script["interval"])
            while number == script["chunks"] and server.script["hold"]:
                time.sleep(HELD_POLL)
            last = b"data: [DONE]\n\n" if number == script["chunks"] else b""
            self._chunk(b"data: %d\n\n" % number + last)
        server.note("finished", tag)  # before the end, at which llama-swap may stop this server at once
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    ModelServer(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])).serve_forever()
