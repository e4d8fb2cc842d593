"""Read a text aloud, sentence by sentence, however long the GPU is somebody else's.

    python read_aloud.py http://localhost:9393 tts-a "It rained. The cat slept. Nobody minded."

Each sentence is a job. All are handed in at once, so that one turn of the speech model serves them all; no connection
stays open while they wait, so that no timeout can end them. What the client does limit is the time that a sentence
may take once it runs.
"""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.5
"""Between two looks at a job."""

RUN_SECONDS = 120.0
"""How long one sentence may take from the moment on at which it has the GPU. Waiting is not counted."""


class ReadAloud:
    """A client of one proxy. `key` is needed only where the proxy has keys."""

    def __init__(self, base: str, model: str, voice: str = "v", key: str | None = None) -> None:
        self._base, self._model, self._voice = base.rstrip("/"), model, voice
        self._fields = {"Authorization": f"Bearer {key}"} if key else {}

    def hand_in(self, sentence: str) -> str:
        """Ask for a sentence; returns where its job is."""
        body = {"model": self._model, "voice": self._voice, "input": sentence}
        fields = {"Content-Type": "application/json", "Prefer": "respond-async"}
        with self._open("/v1/audio/speech", fields, json.dumps(body).encode()) as response:
            if response.status != 202:
                raise RuntimeError("this is not a proxy that knows jobs")
            location: str = response.headers["Location"]
        return location

    def fetch(self, location: str) -> bytes:
        """The audio of a job, once it is there."""
        while (job := self._job(location))["status"] in {"queued", "running"}:
            if job["status"] == "running" and time.time() - job["started_at"] > RUN_SECONDS:
                self._open(location, {}, method="DELETE").close()
                raise RuntimeError("the sentence took too long; the GPU is free again")
            time.sleep(POLL_SECONDS)
        if job["status"] != "succeeded":
            raise RuntimeError(f"no audio: {job['error']}")
        with self._open(f"{location}/result") as response:
            audio: bytes = response.read()
        return audio

    def _job(self, location: str) -> dict[str, Any]:
        with self._open(location) as response:
            job: dict[str, Any] = json.load(response)
        return job

    def _open(
        self, path: str, fields: dict[str, str] | None = None, body: bytes | None = None, method: str | None = None
    ) -> Any:
        headers = {**self._fields, **(fields or {})}
        request = urllib.request.Request(self._base + path, body, headers, method=method)  # noqa: S310 - given by hand
        return urllib.request.urlopen(request, timeout=30)  # noqa: S310


def main(base: str, model: str, text: str) -> None:
    """Write `sentence-1.wav` and so on into the current directory."""
    reader = ReadAloud(base, model)
    jobs = [reader.hand_in(sentence) for sentence in re.split(r"(?<=[.!?])\s+", text.strip())]
    for number, location in enumerate(jobs, 1):
        name = f"sentence-{number}.wav"
        Path(name).write_bytes(reader.fetch(location))
        print(name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
