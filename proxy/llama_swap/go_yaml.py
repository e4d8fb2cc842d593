"""YAML as llama-swap's library (Go's yaml.v3) reads it into values without a type.

Where the YAML versions differ it goes its own way: `yes`, `no`, `on` and `off` are text, `010` is eight, `1_000` a
thousand, `2024-01-01` a time, and only `true` and `false`, in three spellings, are booleans. A key that stands twice
is an error, an anchor may be defined anew, and what follows the first document is not read. A value that is read as a
number and wanted as text becomes the number's text: the alias `1.0` is `1`.

llama-swap reads every file, writes it out and reads that. Between { } and [ ] two things come back as quoted text:
nothing at all, as in `{unlisted: }`, which is a mistake there and null elsewhere, and a time with a colon.

The text is scanned by PyYAML, which accepts the same language; only the meaning of scalars and mappings is ours.
"""

from __future__ import annotations

import base64
import math
import re
from datetime import datetime
from decimal import Decimal
from typing import Any

import yaml

Node = yaml.Node
_Inside = tuple[yaml.CollectionNode, ...]
"""The mappings and sequences around a value."""

_TAG = "tag:yaml.org,2002:"
_STR, _MERGE = f"{_TAG}str", f"{_TAG}merge"
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
}
_INTEGER = re.compile(r"([-+]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0[oO]?([0-7]+)|(0|[1-9][0-9]*))")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_TIME = re.compile(
    r"([0-9]{4}-[0-9]{1,2}-[0-9]{1,2})"
    r"(?:([Tt ])([0-9]{1,2}:[0-9]{1,2}:[0-9]{1,2})(?:\.([0-9]{1,9}))?(Z|[-+][0-9]{2}:[0-9]{2})?)?"
)
_DEEPEST = 100  # levels of nesting; a configuration has ten, and Python's own stack must outlast it
_MOST = 400_000  # values, aliases followed; where the library begins to doubt that somebody wrote them


class NonText(str):
    """A key that was written as a number, a boolean or the like: its text, and `value`, by which Go sorts it.

    llama-swap replaces no macros below a mapping that has one.
    """

    __slots__ = ("value",)

    def __new__(cls, value: Any) -> NonText:
        key = super().__new__(cls, go_text(value))
        key.value = value
        return key

    value: Any


class _Loader(yaml.SafeLoader):
    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return _resolve(value)[0] if implicit[0] else _STR
        return _TAG + ("seq" if kind is yaml.SequenceNode else "map")

    def compose_node(self, parent: Any, index: Any) -> Any:
        if not self.check_event(yaml.AliasEvent):
            self.anchors.pop(self.peek_event().anchor, None)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)


def compose(text: str) -> Node | None:
    """The first document of `text`, or None where there is none. Raises ValueError with a reason."""
    try:
        loader = _Loader(text)
        root: Node | None = loader.get_node() if loader.check_node() else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"not valid YAML{where}: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"not valid YAML: {str(error).splitlines()[0]}") from None
    return root


def plain(node: Node | None) -> Any:
    """The values of a tree. Raises ValueError with one line per mistake."""
    walk = _Walk()
    value = walk.value(node, ()) if node is not None else None
    if walk.problems:
        raise ValueError("\n".join(walk.problems))
    return value


def go_text(value: Any) -> str:
    """A scalar as Go writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _float_text(value)
    return "" if value is None else str(value)


class _Walk:
    def __init__(self) -> None:
        self.problems: list[str] = []
        self._count = 0

    def value(self, node: Node, inside: _Inside) -> Any:
        self._count += 1
        if self._count > _MOST:
            raise ValueError("it has too many values, counting what its aliases repeat")
        if not isinstance(node, yaml.CollectionNode):
            return self._scalar(node, inside)
        if node in inside or len(inside) > _DEEPEST:
            self._problem(node, "nested too deeply, or an anchor whose value contains itself")
            return None
        inside = (*inside, node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, inside)
        return [self.value(item, inside) for item in node.value]

    def _problem(self, node: Node, text: str) -> None:
        self.problems.append(f"line {node.start_mark.line + 1}: {text}")

    def _scalar(self, node: Node, inside: _Inside) -> Any:
        if node.tag in {_STR, _MERGE}:
            return node.value
        if any(each.flow_style for each in inside) and (not node.value or ":" in node.value):
            return node.value
        if node.tag == f"{_TAG}binary":
            return base64.b64decode(node.value).decode(errors="replace")
        tag, value = _resolve(node.value)
        if node.tag == f"{_TAG}float" and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if node.tag.startswith(_TAG) and tag != node.tag:
            self._problem(node, f"{node.value!r} is not what its tag !!{node.tag.removeprefix(_TAG)} says")
        return value if tag == node.tag else node.value

    def _mapping(self, node: yaml.MappingNode, inside: _Inside) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: list[Node] = []
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, "a key must be plain text")
                continue
            if key_node.value in lines:
                self._problem(key_node, f"the key {key_node.value!r} stands in line {lines[key_node.value]} already")
                continue
            lines[key_node.value] = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                merged = [value_node]
            else:
                values[self._key(key_node, inside)] = self.value(value_node, inside)
        for each in merged:
            self._merge(values, each, inside)
        return values

    def _key(self, node: yaml.ScalarNode, inside: _Inside) -> str:
        value = self._scalar(node, inside) if node.value else ""  # an empty key, too, comes back quoted
        return value if isinstance(value, str) else NonText(value)

    def _merge(self, values: dict[str, Any], node: Node, inside: _Inside) -> None:
        for part in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(part, yaml.MappingNode):
                self._problem(part, "what << merges in must be a mapping, or a list of them")
                continue
            for key, value in self.value(part, inside).items():
                values.setdefault(key, value)


def _resolve(text: str) -> tuple[str, Any]:
    """(tag, value) of a scalar without quotes."""
    if text == "<<":
        return _MERGE, text
    value = _WORDS[text] if text in _WORDS else _number(text) if text[:1] in set("+-.0123456789") else text
    if isinstance(value, str):
        return (f"{_TAG}timestamp" if value != text or _TIME.fullmatch(text) else _STR), value
    kinds = {bool: "bool", int: "int", float: "float"}
    return _TAG + kinds.get(type(value), "null"), value


def _number(text: str) -> Any:
    """A time as text, an integer, a float, or else the text itself."""
    time = _time(text)
    if time is not None:
        return time
    bare = text if text.startswith(".") else text.replace("_", "")
    match = _INTEGER.fullmatch(bare)
    if match is not None:
        sign, *digits = match.groups()
        bases = zip(digits, (16, 2, 8, 10), strict=True)
        value = next(int(found, base) for found, base in bases if found)
        value = -value if sign == "-" else value
        if -(2**63) <= value < (2**63 if sign else 2**64):
            return value
    if _FLOAT.fullmatch(bare) and math.isfinite(float(bare)):
        return float(bare)
    return text


def _time(text: str) -> str | None:
    """A time as Go writes it, or None for what is none; without a zone it is UTC."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    date, between, clock, fraction, zone = match.groups()
    if between and (between == " ") == (zone is not None):
        return None
    try:
        moment = datetime.strptime(f"{date} {clock or '0:0:0'}", "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    fraction = (fraction or "").rstrip("0")
    zone = zone if zone and not zone.endswith("00:00") else "Z"
    return moment.isoformat() + (f".{fraction}" if fraction else "") + zone


def _float_text(value: float) -> str:
    """The shortest text that is this number, from a million on with an exponent, as Go's format `g` has it."""
    if not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    figures = "".join(map(str, digits))
    power = len(figures) - 1 + int(exponent)
    minus = "-" if sign else ""
    if value == 0:
        return f"{minus}0"
    if power < -4 or power >= 6:
        rest = f".{figures[1:]}" if figures[1:] else ""
        return f"{minus}{figures[0]}{rest}e{'-' if power < 0 else '+'}{abs(power):02d}"
    return f"{minus}{Decimal(repr(abs(value))).normalize():f}"
