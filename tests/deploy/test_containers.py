"""The image and the compose file for real: built, started, used through the published port, stopped under load."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from containers_support import CannotRunError, Stack, base_image, build_image, find_podman, only_one, prometheus_image

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The first run makes the base image too: a few minutes.
pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]

CHAT = {"model": "chat-a", "stream": True, "messages": [{"role": "user", "content": "x"}]}
SPEECH = {"model": "tts-a", "input": "x", "voice": "v"}
EMBEDDING = {"model": "embed-a", "input": "x"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("podman")
    try:
        podman = find_podman(directory)
        with only_one():
            base = base_image(podman)
            image = build_image(podman, base, directory)
            prometheus = prometheus_image(podman, base, directory)
    except CannotRunError as reason:
        pytest.skip(str(reason))
    stack = Stack(podman, image, prometheus)
    try:
        stack.compose("up", "--detach", "--no-build", *stack.services)
        yield stack
        stack.compose("down", "--volumes")
    finally:
        stack.remove()
    assert stack.leftovers() == []


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    """A client of the running stack; a test before may have stopped it."""
    stack.podman("start", stack.container("proxy"))
    with httpx.Client(base_url=stack.url, timeout=60, trust_env=False) as client:
        eventually(lambda: answers(client, "/-/readyz"))
        yield client
    for service in stack.services:
        print(service, stack.logs(service), sep="\n")  # pytest shows it where the test has failed


def test_streamed_chat_arrives_whole(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/chat/completions", json=CHAT) as response:
        events = [line for line in response.iter_lines() if line and not line.startswith(":")]
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert text_of(events).startswith("chat-a says")
    assert events[-1] == "data: [DONE]"


def test_speech_arrives_as_audio(client: httpx.Client) -> None:
    response = client.post("/v1/audio/speech", json=SPEECH)
    assert (response.status_code, response.headers["x-lease-class"]) == (200, "tts")
    assert response.content.startswith(b"RIFF")


def test_llama_swaps_configuration_is_read_from_the_mounted_directory(client: httpx.Client) -> None:
    """Only with it known does the proxy answer by itself, in llama-swap's own words."""
    response = client.post("/v1/chat/completions", json=CHAT | {"model": "nobody"})
    assert (response.status_code, response.json()["src"]) == (404, "llama-swap")
    assert "x-lease-class" not in response.headers
    asked = client.get("/-/metrics").text
    assert 'gpu_lease_rejected_total{reason="not_found"} 1.0' in asked


def test_embeddings_arrive_as_numbers(client: httpx.Client) -> None:
    response = client.post("/v1/embeddings", json=EMBEDDING)
    assert (response.status_code, response.headers["x-lease-class"]) == (200, "embed")
    assert all(isinstance(number, float) for number in response.json()["data"][0]["embedding"])


def test_a_large_body_waits_on_the_spool_volume(client: httpx.Client, stack: Stack) -> None:
    def opened_by_the_proxy() -> str:
        return stack.execute("proxy", "find", "/proc/1/fd", "-lname", "/spool/*")

    with ThreadPoolExecutor() as pool, unfinished_chat(client):
        waiting = pool.submit(client.post, "/v1/audio/speech", json={**SPEECH, "input": "x" * (3 << 20)})
        eventually(lambda: opened_by_the_proxy() != "")
        lift_hold(client)
        assert waiting.result().status_code == 200
    assert opened_by_the_proxy() == ""
    assert stack.execute("proxy", "find", "/spool", "-type", "f") == ""


@pytest.mark.usefixtures("client")
def test_the_process_has_no_rights_but_its_own(stack: Stack) -> None:
    status = dict(line.split(":\t", 1) for line in stack.execute("proxy", "cat", "/proc/1/status").splitlines())
    assert status["Uid"].split() == ["10001"] * 4
    assert status["Gid"].split() == ["10001"] * 4
    assert {status[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"


@pytest.mark.usefixtures("client")
def test_only_the_volumes_and_tmp_can_be_written(stack: Stack) -> None:
    assert stack.inspect("proxy", "{{.HostConfig.ReadonlyRootfs}}") == "true"
    for path in ("/data", "/spool", "/tmp"):  # noqa: S108
        stack.execute("proxy", "touch", f"{path}/probe")
        stack.execute("proxy", "rm", f"{path}/probe")
    for path in ("/", "/config", "/opt/gpu-lease-proxy"):
        with pytest.raises(subprocess.CalledProcessError):
            stack.execute("proxy", "touch", f"{path}/probe")
    assert stack.execute("proxy", "stat", "--format=%u:%g", "/data", "/spool").split() == ["10001:10001"] * 2


@pytest.mark.usefixtures("client")
def test_health_checks_pass(stack: Stack) -> None:
    for service in ("proxy", "llama-swap"):
        stack.podman("healthcheck", "run", stack.container(service))  # exits 1 where the check fails


@pytest.mark.usefixtures("client")
def test_llama_swap_is_reached_through_the_proxy_alone(stack: Stack) -> None:
    assert stack.podman("port", stack.container("proxy")).strip() == f"9393/tcp -> 127.0.0.1:{stack.port}"
    assert stack.podman("port", stack.container("llama-swap")).strip() == ""


def test_prometheus_shows_the_proxy_and_llama_swap_as_up(client: httpx.Client, stack: Stack) -> None:
    if "prometheus" not in stack.services:
        pytest.skip("prometheus is not there (scripts/server-tools gets it on Debian)")
    client.post("/v1/embeddings", json=EMBEDDING).raise_for_status()
    with httpx.Client(base_url=f"http://127.0.0.1:{stack.prometheus_port}", timeout=10, trust_env=False) as prometheus:
        eventually(lambda: answers(prometheus, "/-/ready"))
        eventually(lambda: targets(prometheus) == {"gpu-lease-proxy": ("up", ""), "llama-swap": ("up", "")}, within=60)
        rules = [rule["name"] for group in ask(prometheus, "rules")["groups"] for rule in group["rules"]]
    assert "GpuLeaseUpstreamDown" in rules
    published = stack.podman("port", stack.container("prometheus")).strip()
    assert published == f"9090/tcp -> 127.0.0.1:{stack.prometheus_port}"


def targets(prometheus: httpx.Client) -> dict[str, tuple[str, str]]:
    """What the target page tells of each job: its health, and the last error."""
    found = ask(prometheus, "targets")["activeTargets"]
    return {each["labels"]["job"]: (each["health"], each["lastError"]) for each in found}


def ask(prometheus: httpx.Client, path: str) -> Any:
    return prometheus.get(f"/api/v1/{path}").raise_for_status().json()["data"]


def test_sigterm_lets_a_running_stream_end_and_exits_0(client: httpx.Client, stack: Stack) -> None:
    with ThreadPoolExecutor() as pool, unfinished_chat(client) as lines:
        stopping = pool.submit(stack.compose, "stop", "proxy")
        eventually(lambda: not answers(client, "/-/readyz"))
        refused = client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        lift_hold(client)
        events = list(lines)
        stopping.result()
    assert events[-1] == "data: [DONE]"
    assert stack.inspect("proxy", "{{.State.Status}} {{.State.ExitCode}}") == "exited 0"


@contextmanager
def unfinished_chat(client: httpx.Client) -> Iterator[Iterator[str]]:
    """The lines of a streamed chat that has begun, and ends once `lift_hold` is called."""
    hold(client, value=True)
    try:
        with client.stream("POST", "/v1/chat/completions", json=CHAT) as response:
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line and not line.startswith(":"))
            assert "chat.completion.chunk" in next(lines)
            yield lines
    finally:
        with suppress(httpx.TransportError):  # the proxy is gone where a test has stopped it
            lift_hold(client)


def hold(client: httpx.Client, *, value: bool) -> None:
    """Tell the simulator whether chats are to stay without their end; the proxy passes this through."""
    client.post("/_sim/script", json={"chat-a": {"hold": value}}).raise_for_status()


def lift_hold(client: httpx.Client) -> None:
    hold(client, value=False)


def text_of(events: list[str]) -> str:
    chunks: list[dict[str, Any]] = [json.loads(line.removeprefix("data: ")) for line in events[:-1]]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False


def eventually(condition: Callable[[], bool], within: float = 30) -> None:
    """Returns once the condition holds; nobody tells us when it does."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within:.0f} s"
        time.sleep(0.05)
