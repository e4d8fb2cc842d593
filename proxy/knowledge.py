"""What is known of llama-swap at this moment, and where it comes from.

Its configuration file, where one is mounted; else its listing; else only the settings. Each change makes a new
`Classifier`, set in one assignment, so that a request sees either the old or the new whole. The file is looked at every
two seconds, as llama-swap looks at it; on SIGHUP; and when a name is asked for that it does not have, since the file
may be newer than the last look. A broken file keeps the old one, as llama-swap does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from proxy.classify import Classification, Classifier
from proxy.errors import SettingsError, UnknownModel
from proxy.llama_swap import Catalog, LlamaSwapConfig, LocalModel, Resolution, catalog_from_listing, load
from proxy.routes import Route
from proxy.settings import Settings

log = structlog.get_logger("gpu_lease_proxy")

WATCH_SECONDS = 2.0
"""Between two looks at the file: llama-swap's own interval. Polling, for bind-mounted files change their inode."""

REREAD_SECONDS = 1.0
"""Between two readings because of unknown names, so that a client that invents names costs nothing."""


class Knowledge:
    """Holds the classifier of now. `on_change` is called after each change of the configuration."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        """Raises SettingsError where llama-swap's configuration is broken."""
        self._settings, self._environ = settings, environ
        self._path = settings.llama_swap_config
        self._stamp = _stamp(self._path)
        self._reread = float("-inf")
        self.profile: str | None = None
        self.on_change: Callable[[Classifier], None] = lambda classifier: None
        config = load(self._path, environ) if self._path is not None else None
        self.classifier = Classifier(settings, config=config)
        self._tell(config)

    @property
    def from_file(self) -> bool:
        """Whether llama-swap's configuration is known."""
        return self._path is not None

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys that llama-swap itself asks for."""
        config = self.classifier.config
        return config.api_keys if config is not None else ()

    def units(self, model: str) -> frozenset[str]:
        """What the lock counts for llama-swap's model of that id."""
        return self.classifier.units(model)

    def ignores_websockets(self, model: str) -> bool:
        """Whether llama-swap neither loads nor keeps `model` for a WebSocket (`compat.ignoreWebsockets`)."""
        config = self.classifier.config
        local = config.models.get(model) if config is not None else None
        return local is not None and local.ignore_websockets

    def refine(self, route: Route) -> Route:
        """See `Classifier.refine`."""
        return self.classifier.refine(route, self.profile)

    def classify(self, route: Route, name: str | None, *, rewritten: bool = True) -> Classification:
        """See `Classifier.classify`; an unknown name is looked for in the file once more. Raises UnknownModel."""
        try:
            return self.classifier.classify(route, name, self.profile, rewritten=rewritten)
        except UnknownModel:
            if not self._may_reread() or not self.look():
                raise
        return self.classifier.classify(route, name, self.profile, rewritten=rewritten)

    def _may_reread(self) -> bool:
        now = time.monotonic()
        if now - self._reread < REREAD_SECONDS:
            return False
        self._reread = now
        return True

    # -- changes

    def look(self) -> bool:
        """Read the file if it is not the one that was read last; whether it gave something new."""
        stamp = _stamp(self._path)
        return stamp != self._stamp and self.reload()

    def reload(self) -> bool:
        """Read the file again; False, and a line in the log, where it is broken or there is none."""
        if self._path is None:
            return False
        self._stamp = _stamp(self._path)
        try:
            config = load(self._path, self._environ)
        except SettingsError as error:
            log.error("llama_swap_config_broken", problems=error.problems, kept="the one before")
            return False
        self._use(Classifier(self._settings, config=config))
        self._tell(config)
        return True

    def take_listing(self, body: Any) -> None:
        """Use the body of `/v1/models`, where there is no file."""
        if self.from_file:
            return
        try:
            catalog = catalog_from_listing(body)
        except ValueError as error:
            log.warning("listing_unreadable", problem=str(error))
            return
        before = self.classifier.catalog
        if before is None:
            log.info("names_from", source="listing", models=len(catalog.models))
        if before is None or _meaning(before) != _meaning(catalog):
            self._use(Classifier(self._settings, catalog=catalog))

    def take_profile(self, name: str | None) -> None:
        """The active profile is `name`."""
        if name != self.profile:
            log.info("profile", active=name)
            self.profile = name

    async def watch(self) -> None:
        """Look at the file until cancelled."""
        while self._path is not None and self._settings.watch_config:
            await asyncio.sleep(WATCH_SECONDS)
            self.look()

    def _use(self, classifier: Classifier) -> None:
        self.classifier = classifier
        self.on_change(classifier)

    def _tell(self, config: LlamaSwapConfig | None) -> None:
        if config is None:
            log.info("names_from", source="settings", until="llama-swap lists its models")
            return
        log.info("names_from", source=str(self._path), models=len(config.models), routing=config.routing)
        if config.notes:
            log.info("llama_swap_config_notes", ignored=list(config.notes))


def _meaning(catalog: Catalog) -> tuple[Mapping[str, LocalModel], dict[str, Resolution | None]]:
    """All that a catalog says, to compare it with another."""
    return catalog.models, {name: catalog.resolve(name) for name in catalog.names()}


def _stamp(path: Path | None) -> tuple[tuple[str, int, int], ...]:
    """Name, time and size of the file, or of each file of the directory."""
    if path is None:
        return ()
    try:
        files = sorted(file for file in path.iterdir() if file.suffix in {".yml", ".yaml"}) if path.is_dir() else [path]
        stats = [(file, file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((str(file), stat.st_mtime_ns, stat.st_size) for file, stat in stats)
