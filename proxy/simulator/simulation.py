"""One run of the simulated llama-swap under one configuration: what the routes work on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.simulator import listing
from proxy.simulator.events import Events
from proxy.simulator.names import Names
from proxy.simulator.scripts import Scripts
from proxy.simulator.swapper import Swapper

if TYPE_CHECKING:
    from proxy.simulator.config import Config
    from proxy.simulator.journal import Journal


class Simulation:
    def __init__(self, config: Config, journal: Journal, time_scale: float) -> None:
        self.config = config
        self.journal = journal
        self.names = Names(config)
        self.events = Events()
        self.scripts = Scripts(config)
        self.swapper = Swapper(config, self.scripts, journal, time_scale, self.publish_states)

    def publish_states(self) -> None:
        self.events.publish("modelStatus", listing.snapshot(self.config, self.swapper.states))

    def active_profile(self) -> dict[str, str | None]:
        return {"active": self.names.active_profile or None}

    def activate(self, profile: str) -> None:
        if profile != self.names.active_profile:
            self.names.active_profile = profile
            self.events.publish("profileChanged", self.active_profile())
            self.publish_states()

    def close(self) -> None:
        """Ends it as a reload does: streams end cleanly, those who wait are refused, feeds end."""
        self.swapper.close()
        self.events.close()
