"""Every setting with its default and its meaning, and what two of them must not say together.

The texts here are those of the JSON schema; docs/configuration.md says more. A key that is written without a value
keeps its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from proxy.settings.layers import Layer, nearest
from proxy.settings.units import format_duration
from proxy.settings.values import (
    AllowedHost,
    ClassName,
    Count,
    Directory,
    Duration,
    DurationOrAuto,
    DurationOrOff,
    FileOrDirectory,
    Key,
    Keys,
    ListenHost,
    Network,
    Pattern,
    Port,
    PositiveDuration,
    PositiveDurationOrAuto,
    Size,
    Slots,
    UpstreamUrl,
)

Lease = Literal["auto", "read", "write", "none"]

BUILT_IN_CLASSES = ("llm", "tts", "embed", "stt", "image")

_LOOPBACK = (ip_network("127.0.0.0/8"), ip_network("::1/128"))


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Settings that are right one by one and wrong together; reported at `key`."""

    key: str
    others: frozenset[str]
    text: str


_reading: ContextVar[tuple[Layer, list[Contradiction]] | None] = ContextVar("reading", default=None)


class LayerSource(PydanticBaseSettingsSource):
    """The source that pydantic-settings reads: file and environment as one layer, which knows each value's origin.

    Its own environment source ignores what it does not know and cannot tell where a value was written.
    """

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """One value of the layer."""
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """All values of the layer, right or wrong."""
        reading = _reading.get()
        return dict(reading[0].values) if reading is not None else {}


class _DefaultsForEmptyKeys:
    @model_validator(mode="before")
    @classmethod
    def _without_value_means_default(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known: Mapping[str, FieldInfo] = getattr(cls, "model_fields", {})
        return {key: value for key, value in values.items() if value is not None or key not in known}


class ClassSettings(_DefaultsForEmptyKeys, BaseModel):
    """One class of models."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lease: Lease = Field(
        default="auto",
        description="How requests of this class share the GPU: read with other reads, write with nothing, none without "
        "waiting. auto is write for tts, none for embed, read for all others; with llama_swap_config it follows from "
        "what can be loaded together.",
    )
    models: tuple[Pattern, ...] = Field(
        default=(),
        description="Model names, or patterns with * and ?, of this class. They win over the built-in patterns.",
    )
    max_wait: PositiveDuration | None = Field(
        default=None, description="max_wait of this class; unset: the common one."
    )
    keepalive: bool = Field(default=True, description="Whether waiting streams of this class get keep-alives.")
    on_disconnect: Literal["cancel", "drain"] = Field(
        default="cancel",
        description="What becomes of a running request whose client has left: cancel ends it upstream too; drain reads "
        "it to its end and keeps the lease until then, for engines that crash on a cancel or work on after it.",
    )
    websocket: Literal["bridge", "refuse"] = Field(
        default="bridge",
        description="Whether WebSockets to this class are bridged, under a lease, or refused.",
    )


class Settings(_DefaultsForEmptyKeys, BaseSettings):
    """All settings. Durations are seconds, sizes are bytes."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=False)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is given by hand and the layer that `read` is checking."""
        return init_settings, LayerSource(settings_cls)

    @classmethod
    def of(cls, layer: Layer, contradictions: list[Contradiction]) -> Settings:
        """The settings that `layer` holds; contradictions are added to the list instead of being raised.

        Raises pydantic.ValidationError with all values that are wrong.
        """
        token = _reading.set((layer, contradictions))
        try:
            return cls()
        finally:
            _reading.reset(token)

    upstream_url: UpstreamUrl | None = Field(
        default=None,
        description="Where llama-swap listens, without a path. Unset: the demo, with a simulated llama-swap.",
    )
    upstream_api_key: Key | None = Field(
        default=None, description="The key for llama-swap. Where api_keys are set it replaces the client's own."
    )
    llama_swap_config: FileOrDirectory | None = Field(
        default=None,
        description="llama-swap's own configuration, a file or a directory: names, what may be loaded together, slots "
        "and keys are then known from it.",
    )
    watch_config: bool = Field(
        default=True, description="Look at llama_swap_config every 2s and use it when it has changed."
    )
    listen_host: ListenHost = Field(
        default="127.0.0.1", description="The address to listen on; 0.0.0.0 for all of IPv4."
    )
    listen_port: Port = Field(default=9393, description="The port to listen on; 0 takes a free one.")
    admin_port: Port | None = Field(
        default=None,
        description="A port of its own for the proxy's pages under /-/; the other one then has only /-/healthz, "
        "/-/readyz and /-/jobs/. 0 takes a free one.",
    )
    http_parser: Literal["h11", "httptools"] = Field(
        default="httptools", description="Which parser reads clients' requests."
    )
    policy: Literal["batch", "fifo"] = Field(
        default="batch",
        description="batch lets requests of the current turn pass waiters of another for a bounded time; fifo never.",
    )
    switch_after: DurationOrAuto = Field(
        default=None,
        description="How long newcomers of the current turn may still pass a waiter of another turn (batch). auto "
        "follows the measured load times, from 1s to 5m.",
    )
    max_turn: PositiveDurationOrAuto = Field(
        default=None,
        description="A turn grants nothing more after this long while another waits (batch). auto is four times "
        "switch_after, at least 1m and at most half of max_wait.",
    )
    max_wait: PositiveDuration = Field(
        default=540.0,
        description="A request that waited so long is refused; below the 600 s at which SDKs give up themselves.",
    )
    max_queue: Count = Field(default=256, description="How many requests may wait at once.")
    max_queue_per_client: Count = Field(
        default=64,
        description="How many requests of one client may wait: of one API key where keys are set, else one address.",
    )
    max_head: Size = Field(default=64 * 2**10, description="The largest head of a request.")
    head_timeout: PositiveDuration = Field(
        default=10.0, description="A connection whose request has no whole head after this time is closed."
    )
    body_timeout: PositiveDuration = Field(
        default=60.0, description="A request whose body makes no progress for so long is refused."
    )
    keep_place: Duration = Field(
        default=60.0,
        description="A waiter whose client left gets its place back when the same request returns within this time; 0 "
        "turns it off.",
    )
    keepalive_after: Duration = Field(
        default=3.0,
        description="A streamed text request that waited so long gets its head and a comment, so that no client gives "
        "up; until then refusals keep their status.",
    )
    keepalive_every: PositiveDuration = Field(
        default=3.0, description="The time between two comments, until the first byte from upstream."
    )
    json_keepalive_after: DurationOrOff = Field(
        default=None,
        description="A plain JSON answer that is awaited for so long gets its head and then spaces; off: never.",
    )
    show_position: bool = Field(
        default=False, description="Tell waiting chat streams their class and place, as reasoning text, every 5s."
    )
    flag_incomplete: bool = Field(
        default=True,
        description="End a chat stream that lacks its last event with an error, so that no client takes half an answer "
        "for a whole one.",
    )
    response_buffer: Size = Field(
        default=16 * 2**20,
        description="How far one answer is read ahead of its client; the lease ends with the reading.",
    )
    max_response_buffers: Size = Field(
        default=256 * 2**20, description="The most that all answers read ahead may take in memory together."
    )
    stall_timeout: PositiveDuration = Field(
        default=60.0, description="A client with a full response_buffer that reads nothing for so long is cut off."
    )
    websocket_idle: PositiveDuration = Field(
        default=600.0, description="A WebSocket without a message for so long is closed; it holds its model's lease."
    )
    job_ttl: PositiveDuration = Field(default=3600.0, description="How long a finished job and its result are kept.")
    jobs_max_bytes: Size = Field(
        default=2**30, description="The most that the requests and results of all jobs may take on disk."
    )
    max_body: Size = Field(default=256 * 2**20, description="The largest request body.")
    max_spool: Size = Field(
        default=2 * 2**30, description="The most that all waiting bodies together may take on disk."
    )
    spool_dir: Directory | None = Field(
        default=None,
        description="The directory for waiting bodies above 1 MiB; unset: the system's one for temporary files.",
    )
    data_dir: Directory | None = Field(
        default=None, description="The directory for jobs. Unset: a temporary one, and no job outlives a restart."
    )
    slots: Slots = Field(
        default={"*": 10},
        description="At most so many requests of one model run at once: llama-swap's concurrencyLimit. One number, or "
        "numbers by model name or pattern; unset: as llama_swap_config says, else 10.",
    )
    default_class: str = Field(default="llm", description="The class of a model that nothing else decides.")
    classes: dict[ClassName, ClassSettings] = Field(
        default={},
        validate_default=True,
        description="Classes of models by name: llm, tts, embed, stt, image and your own.",
    )
    api_keys: Keys | None = Field(default=None, description="The keys that clients may use; unset: none is needed.")
    trusted_proxies: tuple[Network, ...] = Field(
        default=_LOOPBACK, description="Addresses and networks whose X-Forwarded-For and the like are believed."
    )
    allowed_hosts: tuple[AllowedHost, ...] = Field(
        default=(),
        description="Further host names under which the page's buttons work: IP addresses, localhost, this machine's "
        "own name and names without a dot always do.",
    )
    max_hold: DurationOrOff = Field(
        default=None, description="A lease held for longer is logged and counted, not ended."
    )
    shutdown_grace: Duration = Field(default=30.0, description="How long a stop waits for running requests.")
    slow_wait_log: Duration = Field(default=2.0, description="A wait longer than this is logged.")
    log_format: Literal["plain", "json"] = Field(default="plain", description="How log lines are written.")

    @field_validator("classes", mode="before")
    @classmethod
    def _with_built_in_classes(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        named = {str(name).lower(): {} if entry is None else entry for name, entry in given.items()}
        return {**{name: {} for name in BUILT_IN_CLASSES}, **named}

    @model_validator(mode="after")
    def _agree(self) -> Self:
        """Raise for the first contradiction, or add all of them to the list given to `of`."""
        found, reading = self._contradictions(), _reading.get()
        if reading is not None:
            reading[1].extend(found)
        elif found:
            raise ValueError(f"{found[0].key}: {found[0].text}")
        return self

    def max_wait_of(self, class_name: str) -> float:
        """Seconds that a request of this class may wait."""
        own = self.classes[class_name].max_wait
        return self.max_wait if own is None else own

    def drains(self, class_name: str) -> bool:
        """Whether a running request of this class goes on to its end when its client has left."""
        return self.classes[class_name].on_disconnect == "drain"

    def _contradictions(self) -> list[Contradiction]:
        found = []
        if self.max_turn is not None and self.switch_after is not None and self.max_turn < self.switch_after:
            shorter, longer = format_duration(self.max_turn), format_duration(self.switch_after)
            text = f"{shorter} is less than switch_after, {longer}; it must be at least that"
            found.append(Contradiction("max_turn", frozenset({"switch_after"}), text))
        if self.default_class not in self.classes:
            meant = nearest(self.default_class, self.classes)
            text = f"{self.default_class!r} is not one of the classes; did you mean {meant}?"
            found.append(Contradiction("default_class", frozenset({"classes"}), text))
        if self.upstream_url is not None and self._is_own_address(self.upstream_url):
            text = f"{self.upstream_url} is where this proxy itself listens; it must be llama-swap's address"
            found.append(Contradiction("upstream_url", frozenset({"listen_host", "listen_port"}), text))
        if self.admin_port and self.admin_port == self.listen_port:
            text = f"{self.admin_port} is listen_port too; it must be another one"
            found.append(Contradiction("admin_port", frozenset({"listen_port"}), text))
        return found + self._patterns_in_two_classes()

    def _is_own_address(self, url: str) -> bool:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        local = {"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"}  # noqa: S104 - compared with, not bound to
        here = self.listen_host in local and parts.hostname in local
        return port == self.listen_port and (here or parts.hostname == self.listen_host)

    def _patterns_in_two_classes(self) -> list[Contradiction]:
        owner: dict[str, str] = {}
        found = []
        for name, entry in self.classes.items():
            for pattern in entry.models:
                if owner.setdefault(pattern, name) != name:
                    text = f"{pattern!r} stands in classes.{owner[pattern]}.models too; it must be in one class only"
                    found.append(Contradiction(f"classes.{name}.models", frozenset({"classes"}), text))
        return found
