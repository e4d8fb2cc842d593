"""Durations and sizes as people write them, and back.

Both are read once, at the edge, into plain numbers: seconds as float, bytes as int. Writing them back gives the
shortest text that reads as the same number, so that `check` and the schema show `9m` and not `540.0`.
"""

from __future__ import annotations

import math
import re

LONGEST = 30 * 86_400.0
"""Seconds. Nothing here is meant to last longer than a month; a larger number is a slip of the unit."""

LARGEST = 2**50
"""Bytes. More than any disk that a body is spooled to; a larger number is a slip of the unit."""

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_UNITS = (("d", 86_400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0), ("ms", 0.001))
_DURATION = re.compile(r"\s*".join(rf"(?:{_NUMBER}{unit}(?![a-z]))?" for unit, _ in _UNITS))
_PLAIN = re.compile(_NUMBER)

_SIZES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(_NUMBER + r"\s*([a-z]*)", re.IGNORECASE)

DURATION_FORMS = "it must be a duration such as 30s, 10m, 1h30m or 500ms, or a number of seconds"
SIZE_FORMS = "it must be a size such as 16MiB or 16MB, or a whole number of bytes"


def parse_duration(value: object) -> float:
    """Seconds. Raises ValueError, with what is right, for anything that is not a duration of 0 to 30 days."""
    seconds = _seconds(value)
    if seconds is None or not math.isfinite(seconds):
        raise ValueError(DURATION_FORMS)
    if seconds < 0:
        raise ValueError("it must not be negative")
    if seconds > LONGEST:
        raise ValueError(f"it must be at most {format_duration(LONGEST)}")
    return seconds


def _seconds(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(min(value, 2 * LONGEST))
    if not isinstance(value, str) or not value.strip():
        return None
    text = value.strip()
    if _PLAIN.fullmatch(text.removeprefix("-")):
        return float(text)
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    return sum(float(number) * unit for number, (_, unit) in zip(match.groups(), _UNITS, strict=True) if number)


def parse_size(value: object) -> int:
    """Bytes. Raises ValueError, with what is right, for anything that is not a size above 0."""
    size = _bytes(value)
    if size is None:
        raise ValueError(SIZE_FORMS)
    if not 0 < size <= LARGEST:
        raise ValueError(f"it must be more than 0 bytes and at most {format_size(LARGEST)}")
    return size


def _bytes(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return None
    number, unit = match.groups()
    if not unit:
        return int(number) if number.isdigit() else None
    factor = _SIZES.get(unit.upper())
    return None if factor is None else round(float(number) * factor)


def format_duration(seconds: float) -> str:
    """The shortest text that `parse_duration` reads as these seconds, to the millisecond."""
    rest = round(seconds * 1000)
    parts = []
    for unit, worth in _UNITS:
        count, rest = divmod(rest, round(worth * 1000))
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads as these bytes."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)
