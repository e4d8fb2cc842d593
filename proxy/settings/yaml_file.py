"""Settings from a YAML file.

The YAML is that of version 1.2 where the two versions differ, because editors and the JSON schema read it so: `off` and
`no` are text and `1:30` is not ninety. A key that stands twice is a mistake, not a silent last word. The tree of nodes
is walked here, instead of asking PyYAML for finished values, so that each value keeps the line it stands in.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from proxy.settings.layers import Layer, Location, dotted

if TYPE_CHECKING:
    from pathlib import Path

_DEEPEST = 20  # settings need four levels; more than this is an alias that holds itself


class _Loader(yaml.SafeLoader):
    """Reads a plain scalar as null, a boolean, a number of YAML 1.2's core schema, or else as text."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the name and place are PyYAML's; filled below


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+", [*"-+0123456789"]),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", [*"-+.0123456789"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))  # 010 is ten there, not eight


def read_file(path: Path) -> Layer:
    """The settings in the YAML file at `path`."""
    layer = Layer()
    try:
        loader = _Loader(path.read_bytes())
        root = loader.get_single_node()
        if root is not None:
            _Walk(str(path), loader, layer).root(root)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        layer.problems.append(f"{path}: {_why_unreadable(error)}")
    return layer


def _why_unreadable(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"not valid YAML in line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return "not valid YAML: " + (
        "nested too deeply" if isinstance(error, RecursionError) else str(error).split("\n")[0]
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    path: str
    loader: _Loader
    layer: Layer

    def root(self, node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            self.layer.values = self._mapping(node, ())
        elif self._plain(node) is not None:
            self.layer.problems.append(f"{self.path}: must hold keys with values, such as `policy: batch`")

    def _value(self, node: yaml.Node, at: Location) -> object:
        if len(at) > _DEEPEST:
            raise RecursionError
        self.layer.origins[at] = self._where(node)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*at, index)) for index, item in enumerate(node.value)]
        return self._plain(node)

    def _plain(self, node: yaml.Node) -> object:
        value: object = self.loader.construct_object(node, deep=True)
        return value

    def _mapping(self, node: yaml.MappingNode, at: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, at, "a key must be plain text")
                continue
            key = key_node.value.lower() if at == ("classes",) else key_node.value
            if key in lines:
                self._problem(key_node, (*at, key), f"stands twice, first in line {lines[key]}; keep one of them")
                continue
            lines[key] = key_node.start_mark.line + 1
            values[key] = self._value(value_node, (*at, key))
        return values

    def _where(self, node: yaml.Node) -> str:
        return f"{self.path}, line {node.start_mark.line + 1}"

    def _problem(self, node: yaml.Node, at: Location, text: str) -> None:
        self.layer.problems.append(f"{dotted(at) or 'top level'} ({self._where(node)}): {text}")
