"""Settings from the environment.

`GPU_LEASE_<KEY>` is a key of the file. A list is JSON or separated by commas, a mapping is JSON; a class can also be
written key by key: `GPU_LEASE_CLASSES__TTS__LEASE`. A secret can lie in a file that `GPU_LEASE_<KEY>_FILE` names. An
empty variable counts as unset, because that is what `${NAME:-}` in a compose file makes of a missing one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.settings.layers import CLASS_KEYS, SECRETS, Layer, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

PREFIX = "GPU_LEASE_"
CONFIG_VARIABLE = "GPU_LEASE_CONFIG"
_FILE = "_file"
_LISTS = ("allowed_hosts", "api_keys", "trusted_proxies", "models")
# Kubernetes sets these in every pod of a namespace with a Service called gpu-lease-proxy; nobody wrote them.
_INJECTED = re.compile(r"GPU_LEASE_PROXY_(SERVICE_(HOST|PORT)|PORT)(_.*)?")


def read_environment(environ: Mapping[str, str], known: Collection[str]) -> Layer:
    """The settings in the variables that begin with GPU_LEASE_; one that is not `known` is a problem and left out."""
    layer = Layer()
    # Whole classes first, so that the single keys of a class win over them.
    for variable in sorted(environ, key=lambda name: (name.count("__"), name)):
        name = variable.upper()
        if name.startswith(PREFIX) and name != CONFIG_VARIABLE and not _INJECTED.fullmatch(name):
            _read(layer, variable, environ[variable].strip(), known)
    return layer


def _read(layer: Layer, variable: str, text: str, known: Collection[str]) -> None:
    at = _location(variable, known)
    if at is None:
        names = [PREFIX + key.upper() for key in known] + [PREFIX + key.upper() + "_FILE" for key in SECRETS]
        names += [CONFIG_VARIABLE, *(_of_class(variable, key) for key in CLASS_KEYS)]
        layer.problems.append(f"{variable}: unknown variable; did you mean {nearest(variable.upper(), names)}?")
        return
    if not text:
        return
    try:
        if variable.lower().endswith(_FILE) and at[0] in SECRETS:
            value = _from_file(Path(text), at[-1])
        else:
            value = _parse(at, text)
    except ValueError as error:
        layer.problems.append(f"{'.'.join(at)} ({variable}): {error}")
        return
    _put(layer, at, value, variable)


def _of_class(variable: str, key: str) -> str:
    """The variable of a class's key, for the class that a misspelt variable seems to mean."""
    parts = variable.upper().split("__")
    return f"{PREFIX}CLASSES__{parts[1] if len(parts) == 3 and parts[1] else 'TTS'}__{key.upper()}"


def _location(variable: str, known: Collection[str]) -> tuple[str, ...] | None:
    """Where the value of a variable belongs, or None for a variable that nothing reads."""
    first, *nested = variable.lower().removeprefix(PREFIX.lower()).split("__")
    if nested:
        fits = (
            first == "classes"
            and nested[0]
            and len(nested) <= 2
            and nested[1:2] in ([], *([key] for key in CLASS_KEYS))
        )
        return (first, *nested) if fits else None
    if first in known:
        return (first,)
    stem = first.removesuffix(_FILE)
    return (stem,) if stem != first and stem in SECRETS else None


def _parse(at: tuple[str, ...], text: str) -> object:
    """The value that a variable's text stands for. Raises ValueError, never with the text in it."""
    key = at[-1]
    if at == ("classes",):
        return _lowered(_json(text))
    if (at[0] == "classes" and len(at) == 2) or (key == "slots" and text.startswith("{")):
        return _json(text)
    if key in _LISTS:
        return _json(text) if text.startswith("[") else _split(text)
    return text


def _json(text: str) -> object:
    try:
        value: object = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"must be JSON, which it is not: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("must be JSON that is not nested so deeply") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in this JSON; keep one of them")
    return found


def _lowered(value: object) -> object:
    return _unique([(name.lower(), entry) for name, entry in value.items()]) if isinstance(value, dict) else value


def _split(text: str) -> list[str]:
    return [item.strip() for item in re.split(r"[,\n]", text) if item.strip()]


def _from_file(path: Path, key: str) -> object:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    if not text:
        raise ValueError(f"{path} is empty; it must hold the secret")
    return _split(text) if key in _LISTS else text


def _put(layer: Layer, at: tuple[str, ...], value: object, variable: str) -> None:
    if at in layer.origins and layer.origins[at] != variable:
        layer.problems.append(f"{'.'.join(at)} ({variable}): set by {layer.origins[at]} too; keep one of them")
        return
    layer.origins[at] = variable
    target = layer.values
    for step in at[:-1]:
        target = target.setdefault(step, {})
        if not isinstance(target, dict):  # the variable of the whole holds no mapping, which is reported for it
            return
    merged = target.get(at[-1])
    target[at[-1]] = {**merged, **value} if isinstance(merged, dict) and isinstance(value, dict) else value
