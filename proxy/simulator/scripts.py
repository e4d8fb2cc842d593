"""How the model servers behave right now: the configuration's `simulator` values, as changed at run time.

`POST /_sim/script` changes a model's values for good, `x-sim-*` headers change them for one request. With
`x-sim-hold: NAME` one answer stays without its last piece until `POST /_sim/release` gives that name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from proxy.simulator.config import Behaviour, ConfigError, behaviour_from

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.simulator.config import Config

HEADERS = ("work", "chunks", "chunk-interval", "fail", "fail-after")


class Scripts:
    def __init__(self, config: Config) -> None:
        self._behaviours = {model.id: model.behaviour for model in config.models.values()}
        self._released: set[str] = set()

    def __getitem__(self, model: str) -> Behaviour:
        return self._behaviours[model]

    def change(self, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Lays `changes`, by model, over what holds now; all of them or none.

        Raises:
            ConfigError: a model or a key does not exist.
        """
        unknown = set(changes) - set(self._behaviours)
        if unknown:
            raise ConfigError(f"unknown model {min(unknown)!r}")
        self._behaviours |= {
            model: behaviour_from(values, self._behaviours[model]) for model, values in changes.items()
        }

    def for_request(self, model: str, headers: Mapping[str, str]) -> Behaviour:
        """What holds for one request; a failure that is to happen n times is counted down here."""
        behaviour = self._behaviours.get(model, Behaviour())
        if behaviour.fail_times == 0:
            behaviour = replace(behaviour, fail=None)
        elif behaviour.fail is not None and behaviour.fail_times is not None:
            self._behaviours[model] = replace(behaviour, fail_times=behaviour.fail_times - 1)
        given = {name: headers[f"x-sim-{name}"] for name in HEADERS if f"x-sim-{name}" in headers}
        return behaviour_from({name.replace("-", "_"): _value(text) for name, text in given.items()}, behaviour)

    def release(self, name: str) -> None:
        self._released.add(name)

    def holds(self, model: str, headers: Mapping[str, str]) -> bool:
        """Whether an answer has to keep its last piece for now."""
        name = headers.get("x-sim-hold")
        held = name is not None and name not in self._released
        return held or (model in self._behaviours and self._behaviours[model].hold)

    def load_fails(self, model: str) -> bool:
        """Whether the load that is just ending fails."""
        behaviour = self._behaviours[model]
        if isinstance(behaviour.fail_load, bool) or behaviour.fail_load <= 0:
            return bool(behaviour.fail_load)
        self._behaviours[model] = replace(behaviour, fail_load=behaviour.fail_load - 1)
        return True


def _value(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
