"""Containers for the tests, run by podman: it needs no daemon, so it also runs where no Docker engine is to be had.

The images are kept from one run to the next. Debian made by debootstrap is the base image unless TEST_BASE_IMAGE names
another one, so that no image registry is needed. `scripts/container-tools` installs what is used here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from server_tools import find_program, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpu-lease-proxy"

# Python 3.11, the oldest that the proxy runs on.
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,python3-pip,python-is-python3,ca-certificates"
BASE = "localhost/gpu-lease-proxy-test-base"
IMAGE = "localhost/gpu-lease-proxy-test"
PROMETHEUS = "localhost/gpu-lease-proxy-test-prometheus"
BUILT_FROM = (
    ".dockerignore", "Dockerfile", "LICENSE", "README.md", "config/proxy.yaml", "pyproject.toml", "requirements.lock",
)  # fmt: skip
# The newest builds that stay: this one, and two that a run beside this one may be using.
KEPT = 3

# The service manager's cgroups and higher limits than the caller's own are often refused inside containers and
# sandboxes; a test needs neither.
SETTINGS = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
"""
PIP_OPTIONS = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_PROXY")
CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


PROMETHEUS_DOCKERFILE = """
FROM {base}
RUN install --directory --owner=65534 --group=65534 /prometheus
COPY prometheus /bin/prometheus
USER 65534:65534
ENTRYPOINT ["/bin/prometheus"]
"""


class CannotRunError(Exception):
    """This machine runs no containers; the message says why."""


@dataclass(frozen=True)
class Podman:
    """The commands, and the environment they run in."""

    program: str
    compose_program: str
    environment: Mapping[str, str]

    def __call__(self, *arguments: str, timeout: float = 120, check: bool = True, errors: bool = False) -> str:
        return _run([self.program, *arguments], self.environment, timeout, check=check, errors=errors)

    def compose(self, *arguments: str, environment: Mapping[str, str], timeout: float = 120) -> str:
        return _run([self.compose_program, *arguments], {**self.environment, **environment}, timeout)


def find_podman(directory: Path) -> Podman:
    """Podman with settings in `directory` that work without privileges of the surrounding system.

    Raises:
        CannotRunError: if a program is missing.
    """
    settings = SETTINGS
    if shutil.which("runc"):
        settings += 'runtime = "runc"\n'  # crun refuses machines where cgroups are half version 1, half version 2
    path = directory / "containers.conf"
    path.write_text(settings, encoding="utf-8")
    environment = {
        **os.environ,
        "CONTAINERS_CONF": str(path),
        "BUILDAH_ISOLATION": "chroot",
        "BUILDAH_FORMAT": "docker",  # the other format has no place for HEALTHCHECK
    }
    places = f"{CACHE / 'podman-compose' / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return Podman(_program("podman"), _program("podman-compose", places), environment)


def base_image(podman: Podman) -> str:
    """The name of an image with Python; made once, in a minute or two.

    Raises:
        CannotRunError: if none can be made here, or podman cannot start a container of it.
    """
    if image := os.environ.get("TEST_BASE_IMAGE"):
        podman("pull", "--quiet", image, timeout=600)
    else:
        image = f"{BASE}:{hashlib.sha256(f'{SUITE} {PACKAGES}'.encode()).hexdigest()[:12]}"
        if image not in _tags(podman, BASE):
            _bootstrap(podman, image)
    try:
        podman("run", "--rm", "--network", "none", image, "python", "--version")
    except subprocess.CalledProcessError as error:
        raise CannotRunError(f"podman cannot start a container: {error.stderr.strip()[-500:]}") from error
    return image


def build_image(podman: Podman, base: str, directory: Path) -> str:
    """The name of the proxy's image, built from this tree. Layers of earlier builds are reused, old builds removed."""
    image = f"{IMAGE}:{_content(base)}"
    options = ["--build-arg", f"BASE_IMAGE={base}", "--network", "host", *_pip_options(directory)]
    # The first stage gets a name too: without one it could not be found again to be removed.
    podman("build", *options, "--target", "build", "--tag", f"{image}-build", str(ROOT), timeout=600)
    podman("build", *options, "--tag", image, str(ROOT), timeout=600)
    newest_first = [tag for tag in _tags(podman, IMAGE) if tag not in {image, f"{image}-build"}]
    for tag in newest_first[2 * (KEPT - 1) :]:
        podman("image", "rm", tag, check=False)  # one that is in use stays
    return image


def prometheus_image(podman: Podman, base: str, directory: Path) -> str | None:
    """The name of an image with Debian's Prometheus in the place of the one that compose.yaml names; None without one.

    It starts like that one: the same program, the same user, the same directory to write to.
    """
    program = find_program("prometheus")
    if program is None:
        return None
    image = f"{PROMETHEUS}:{hashlib.sha256(base.encode() + Path(program).read_bytes()).hexdigest()[:12]}"
    if image not in _tags(podman, PROMETHEUS):
        context = directory / "prometheus"
        context.mkdir()
        shutil.copy(program, context / "prometheus")
        (context / "Dockerfile").write_text(PROMETHEUS_DOCKERFILE.format(base=base), encoding="utf-8")
        podman("build", "--tag", image, str(context), timeout=300)
    return image


@contextmanager
def only_one() -> Iterator[None]:
    """Held while images are made, so that runs side by side share them instead of making each its own."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Stack:
    """compose.yaml with compose.test.yaml over it, under a name and on a port that no other run has."""

    def __init__(self, podman: Podman, image: str, prometheus: str | None) -> None:
        self.podman = podman
        # Grafana is never among them: its image is not to be had without a registry.
        self.services = ("proxy", "llama-swap", *(["prometheus"] if prometheus else []))
        self.name = f"gpu-lease-proxy-test-{uuid4().hex[:12]}"
        self.port, self.prometheus_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {"PROXY_IMAGE": image, "PROXY_BIND": "127.0.0.1", "PROXY_PORT": str(self.port)}
        self._environment |= {"PROMETHEUS_IMAGE": prometheus or "", "PROMETHEUS_PORT": str(self.prometheus_port)}
        self._environment["LLAMA_SWAP_CONFIG_DIR"] = str(ROOT / "tests" / "deploy" / "llama-swap")

    def compose(self, *arguments: str, timeout: float = 120) -> str:
        files = ["--file", str(ROOT / "compose.yaml"), "--file", str(ROOT / "tests/deploy/compose.test.yaml")]
        chosen = [
            "--in-pod",
            "false",
            "--profile",
            "monitoring",
            "--project-name",
            self.name,
            *files,
            "--env-file",
            str(ROOT / ".env.example"),
        ]
        return self.podman.compose(*chosen, *arguments, environment=self._environment, timeout=timeout)

    def container(self, service: str) -> str:
        """The id of the service's container, running or not."""
        (found,) = self._ids("ps", "--all", "--filter", f"label=com.docker.compose.service={service}")
        return found

    def execute(self, service: str, *command: str) -> str:
        """What the command prints inside the service's container."""
        return self.podman("exec", self.container(service), *command).strip()

    def inspect(self, service: str, template: str) -> str:
        return self.podman("inspect", "--format", template, self.container(service)).strip()

    def logs(self, service: str) -> str:
        """The end of what the service has printed, on both streams."""
        return self.podman("logs", "--tail", "50", self.container(service), errors=True)

    def remove(self) -> None:
        """Everything goes, whatever state it is in."""
        self._remove("rm --force --volumes --time 0", "ps", "--all")
        self._remove("network rm --force", "network", "ls")
        self._remove("volume rm --force", "volume", "ls")

    def leftovers(self) -> list[str]:
        """What is there under this stack's name."""
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [found for kind in kinds for found in self._ids(*kind)]

    def _ids(self, *listing: str) -> list[str]:
        mine = f"label=com.docker.compose.project={self.name}"
        return self.podman(*listing, "--quiet", "--filter", mine).split()

    def _remove(self, how: str, *listing: str) -> None:
        if found := self._ids(*listing):
            self.podman(*how.split(), *found)


def _run(
    command: list[str], environment: Mapping[str, str], timeout: float, *, check: bool = True, errors: bool = False
) -> str:
    """What the command prints, with `errors` on standard error too. A failure carries both as a note."""
    try:
        done = subprocess.run(
            command, env=environment, timeout=timeout, check=check, capture_output=True, text=True, cwd=ROOT
        )
    except subprocess.CalledProcessError as error:
        error.add_note(f"{error.stdout[-2000:]}\n{error.stderr[-4000:]}")
        raise
    return done.stdout + (done.stderr if errors else "")


def _program(name: str, places: str | None = None) -> str:
    found = shutil.which(name, path=places)
    if found is None:
        raise CannotRunError(f"{name} is not installed (scripts/container-tools installs it on Debian)")
    return found


def _tags(podman: Podman, repository: str) -> list[str]:
    """The images of a repository by name, newest first."""
    listing = ("images", "--sort", "created", "--format", "{{.Repository}}:{{.Tag}}")
    return podman(*listing, "--filter", f"reference={repository}").split()


def _bootstrap(podman: Podman, image: str) -> None:
    debootstrap = _program("debootstrap")
    if os.geteuid() != 0:
        raise CannotRunError("debootstrap needs root to make a base image; name one with TEST_BASE_IMAGE")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        root, archive = Path(name, "root"), Path(name, "root.tar")
        options = ["--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), *_mirror()]
        _run([debootstrap, *options], os.environ, timeout=600)
        unneeded = [f"--exclude={path}" for path in ("./dev/*", "./var/cache/apt/*", "./var/lib/apt/lists/*")]
        _run(["tar", "--create", f"--file={archive}", f"--directory={root}", *unneeded, "."], os.environ, timeout=120)
        podman("import", str(archive), image)


def _mirror() -> list[str]:
    """Where this machine's apt has the suite from, if it does; else debootstrap's own default holds."""
    if not (apt_get := shutil.which("apt-get")):
        return []
    wanted = ["Created-By: Packages", f"Codename: {SUITE}", "Component: main"]
    sources = _run([apt_get, "indextargets", "--format", "$(REPO_URI)", *wanted], os.environ, timeout=30, check=False)
    return [uri for uri in sources.split() if uri.startswith("http")][:1]


def _content(base: str) -> str:
    """A name for what the image is made from."""
    digest = hashlib.sha256(base.encode())
    sources = (path for path in (ROOT / "proxy").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for path in [*(ROOT / name for name in BUILT_FROM), *sorted(sources)]:
        digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _pip_options(directory: Path) -> list[str]:
    """This machine's package index and certificates, lent to the build as root's home: the image keeps neither."""
    home = directory / "home"
    settings = home / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True, exist_ok=True)
    names = {name: name.removeprefix("PIP_").lower().replace("_", "-") for name in PIP_OPTIONS if os.environ.get(name)}
    lines = [f"{option} = {os.environ[name]}" for name, option in names.items()]
    if certificates := next((os.environ[name] for name in CERTIFICATES if os.environ.get(name)), None):
        shutil.copy(certificates, home / "certificates.pem")
        lines.append("cert = /root/certificates.pem")
    settings.write_text("\n".join(["[global]", *lines, ""]), encoding="utf-8")
    return ["--volume", f"{home}:/root:ro"]
