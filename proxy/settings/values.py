"""The types of single settings: each takes what a person writes and says in one sentence what is right otherwise.

The sentences begin with "it must", because they follow the value that was given. None of them repeats the value: some
values are secrets.
"""

from __future__ import annotations

import ipaddress
import os
import re
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, WithJsonSchema

from proxy.settings.units import parse_duration, parse_size

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?)*\.?")
_CLASS_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_VISIBLE = re.compile(r"[!-~]+")


def _whole(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value.strip()):
        return int(value)
    raise ValueError("it must be a whole number")


def _duration_or_off(value: object) -> float | None:
    if value is None or value is False or (isinstance(value, str) and value.strip().lower() == "off"):
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}, or off") from None


def _duration_or_auto(value: object) -> float | None:
    if value is None or (isinstance(value, str) and value.strip().lower() == "auto"):
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def _positive(value: float | None) -> float | None:
    if value == 0:
        raise ValueError("it must be more than 0, or auto")
    return value


def _upstream_url(value: str) -> str:
    """The address of llama-swap without a slash at its end."""
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError("it must be a URL such as http://127.0.0.1:8080") from None
    if parts.scheme not in {"http", "https"} or not host:
        raise ValueError("it must begin with http:// or https:// and name a host, such as http://127.0.0.1:8080")
    if "@" in parts.netloc:
        raise ValueError("it must hold no user or password; llama-swap's key belongs in upstream_api_key")
    if parts.path not in {"", "/"} or "?" in value or "#" in value:
        raise ValueError("it must end after the host and port: paths such as /v1 come from the client")
    if not (_VISIBLE.fullmatch(value) and (_HOST_NAME.fullmatch(host) or ":" in host)) or port == 0:
        raise ValueError("it must name a host, and after it at most a port from 1 to 65535")
    return f"{parts.scheme}://{parts.netloc}"


def _listen_host(value: str) -> str:
    """The address without the brackets of a URL."""
    bare = value.removeprefix("[").removesuffix("]") if value.startswith("[") else value
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        if not _HOST_NAME.fullmatch(value) or value.replace(".", "").isdigit():
            raise ValueError(
                "it must be one address or host name, such as 127.0.0.1 or 0.0.0.0; the port is listen_port"
            ) from None
    return value


def _allowed_host(value: str) -> str:
    if not _HOST_NAME.fullmatch(value):
        raise ValueError("it must be a host name without a port, such as gpu.example.org")
    return value.lower()


def _network(value: object) -> IPv4Network | IPv6Network:
    if isinstance(value, IPv4Network | IPv6Network):
        return value
    try:
        interface = ipaddress.ip_interface(str(value).strip())
    except ValueError:
        raise ValueError("it must be an address or a network, such as 192.168.1.10 or 192.168.1.0/24") from None
    if interface.ip != interface.network.network_address:
        raise ValueError(f"it must be the network's own address; did you mean {interface.network}?")
    return interface.network


def _key(value: SecretStr) -> SecretStr:
    if not _VISIBLE.fullmatch(value.get_secret_value()):
        raise ValueError("it must be visible ASCII characters without spaces, and at least one")
    return value


def _keys(value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    if not value:
        raise ValueError("it must hold at least one key; leave it out to serve every client without a key")
    return value


def _pattern(value: str) -> str:
    if not value or value != value.strip():
        raise ValueError("it must be a model name or a pattern such as *tts*, with no space around it")
    return value


def _class_name(value: str) -> str:
    if not _CLASS_NAME.fullmatch(value) or len(value) > 32:
        raise ValueError("a class name must be lower-case letters and digits, with single - or _ between, at most 32")
    return value


def _slots(value: object) -> object:
    if isinstance(value, dict):
        return value
    try:
        return {"*": _whole(value)}
    except ValueError:
        raise ValueError(
            "it must be a whole number, or a mapping of model names or patterns to whole numbers"
        ) from None


def _path(value: object) -> object:
    return Path(os.path.expanduser(value)) if isinstance(value, str) else value


def _file_or_directory(value: object) -> object:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError("it must be the path of a file or a directory")
    return _path(value)


_NUMBER = "[0-9]+(\\.[0-9]+)?"
_DURATION_PATTERN = (
    f"^{_NUMBER}$|^(?=[0-9])" + "".join(f"({_NUMBER}{unit} ?)?" for unit in ("d", "h", "m", "s", "ms")) + "$"
)
_DURATION_SCHEMA = [{"type": "number", "minimum": 0}, {"type": "string", "pattern": _DURATION_PATTERN}]
_SIZE_PATTERN = f"^{_NUMBER} ?([kKmMgGtT]?[bB]|[kKmMgGtT][iI][bB])?$"
_SIZE_SCHEMA = [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": _SIZE_PATTERN}]
_COUNT_SCHEMA = {"type": "integer", "minimum": 1, "maximum": 100_000}

Duration = Annotated[float, BeforeValidator(parse_duration), WithJsonSchema({"anyOf": _DURATION_SCHEMA})]
PositiveDuration = Annotated[Duration, Field(gt=0)]
DurationOrOff = Annotated[
    float | None,
    BeforeValidator(_duration_or_off),
    WithJsonSchema({"anyOf": [{"const": "off"}, {"type": "null"}, *_DURATION_SCHEMA]}),
]
DurationOrAuto = Annotated[
    float | None,
    BeforeValidator(_duration_or_auto),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "null"}, *_DURATION_SCHEMA]}),
]
PositiveDurationOrAuto = Annotated[DurationOrAuto, AfterValidator(_positive)]
Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema({"anyOf": _SIZE_SCHEMA})]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=100_000), WithJsonSchema(_COUNT_SCHEMA)]
Port = Annotated[
    int,
    BeforeValidator(_whole),
    Field(ge=0, le=65_535),
    WithJsonSchema({"type": "integer", "minimum": 0, "maximum": 65_535}),
]
Slots = Annotated[
    dict[str, Count],
    BeforeValidator(_slots),
    WithJsonSchema({"anyOf": [_COUNT_SCHEMA, {"type": "object", "additionalProperties": _COUNT_SCHEMA}]}),
]
UpstreamUrl = Annotated[str, AfterValidator(_upstream_url)]
ListenHost = Annotated[str, AfterValidator(_listen_host)]
AllowedHost = Annotated[str, AfterValidator(_allowed_host)]
Directory = Annotated[Path, BeforeValidator(_path)]
FileOrDirectory = Annotated[Path, BeforeValidator(_file_or_directory)]
Network = Annotated[IPv4Network | IPv6Network, BeforeValidator(_network), WithJsonSchema({"type": "string"})]
Key = Annotated[SecretStr, AfterValidator(_key)]
Keys = Annotated[tuple[Key, ...], AfterValidator(_keys)]
Pattern = Annotated[str, AfterValidator(_pattern)]
ClassName = Annotated[str, AfterValidator(_class_name)]
