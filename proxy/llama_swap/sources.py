"""llama-swap's configuration as one tree: a file, or a directory whose files are merged as `-config-dir` merges them.

In a directory the files `*.yml` and `*.yaml` directly in it count, in the order of their names. Mappings are merged,
lists joined, and the same scalar may stand twice. What has a name (a model, a group, a peer, ...) must stand whole in
one file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from proxy.errors import SettingsError
from proxy.llama_swap.environment import as_written, with_environment
from proxy.llama_swap.go_yaml import Node, compose, plain

_BY_NAME = frozenset(
    (
        *("models", "groups", "profiles", "selectors", "peers", "matrix"),
        *("routing.router.settings.groups", "routing.router.settings.matrix"),
    )
)
"""Mappings whose entries must not be spread over files."""


def read_sources(path: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """The tree of the file or directory at `path`. Raises SettingsError."""
    problems: list[str] = []
    roots: list[tuple[Path, yaml.MappingNode]] = []
    for file in _files(path):
        root = _root(file, environ, problems)
        if root is not None:
            roots.append((file, root))
    merged = None if problems else _merged(roots, problems)
    return _tree(str(path), merged, problems)


def read_text(text: str, environ: Mapping[str, str], name: str = "llama-swap's configuration") -> dict[str, Any]:
    """The tree of `text`, called `name` in messages. Raises SettingsError."""
    problems: list[str] = []
    root = _parsed(text, name, environ, problems)
    return _tree(name, root, problems)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise SettingsError([f"{path}: cannot be read: {error.strerror or error}"]) from None
    found = [path / name for name in sorted(names) if name.endswith((".yml", ".yaml"))]
    if not found:
        raise SettingsError([f"{path}: there is no *.yml and no *.yaml in this directory"])
    return found


def _root(file: Path, environ: Mapping[str, str], problems: list[str]) -> yaml.MappingNode | None:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        problems.append(f"{file}: cannot be read: {error.strerror or error}")
    except UnicodeDecodeError as error:
        problems.append(f"{file}: is not UTF-8 at byte {error.start}")
    else:
        return _parsed(text, str(file), environ, problems)
    return None


def _parsed(text: str, name: str, environ: Mapping[str, str], problems: list[str]) -> yaml.MappingNode | None:
    """The root of one text; None if it is empty."""
    try:
        root = compose(with_environment(text, environ))
        plain(root)
    except ValueError as error:
        problems += [as_written(f"{name}: {line}") for line in str(error).splitlines()]
        return None
    if root is None or (isinstance(root, yaml.ScalarNode) and not root.value):
        return None
    if not isinstance(root, yaml.MappingNode):
        problems.append(f"{name}: it must be a mapping, such as `models:` with models below it")
        return None
    return root


def _tree(name: str, root: yaml.MappingNode | None, problems: list[str]) -> dict[str, Any]:
    if problems:
        raise SettingsError(problems)
    try:
        return plain(root) or {}
    except ValueError as error:
        raise SettingsError([as_written(f"{name}: {line}") for line in str(error).splitlines()]) from None


def _merged(roots: list[tuple[Path, yaml.MappingNode]], problems: list[str]) -> yaml.MappingNode | None:
    if not roots:
        return None
    merged = roots[0][1]
    for file, root in roots[1:]:
        _merge(merged, root, "", file, problems)
    return merged


def _merge(into: yaml.MappingNode, other: yaml.MappingNode, at: str, file: Path, problems: list[str]) -> None:
    there = {key.value: value for key, value in other.value}
    merged = []
    for key, value in into.value:
        below = f"{at}.{key.value}" if at else str(key.value)
        added = there.pop(key.value, None)
        merged.append((key, value if added is None else _joined(value, added, below, file, problems)))
    into.value = merged + [(key, value) for key, value in other.value if key.value in there]


def _joined(value: Node, added: Node, at: str, file: Path, problems: list[str]) -> Node:
    if at in _BY_NAME:
        _add_by_name(value, added, at, file, problems)
    elif isinstance(value, yaml.MappingNode) and isinstance(added, yaml.MappingNode):
        _merge(value, added, at, file, problems)
    elif isinstance(value, yaml.SequenceNode) and isinstance(added, yaml.SequenceNode):
        value.value = [*value.value, *added.value]
    elif _is_empty(value):
        return added
    elif not _is_empty(added) and (value.tag, value.value) != (added.tag, added.value):
        problems.append(f"{file}: {as_written(at)} has another value here than in a file before it")
    return value


def _add_by_name(value: Node, added: Node, at: str, file: Path, problems: list[str]) -> None:
    if not (isinstance(value, yaml.MappingNode) and isinstance(added, yaml.MappingNode)):
        problems.append(f"{file}: {at} must be a mapping in every file that has it")
        return
    there = {key.value for key, _ in value.value}
    twice = [key.value for key, _ in added.value if key.value in there]
    problems += [f"{file}: {at}.{as_written(name)} stands in a file before it too; keep one of them" for name in twice]
    value.value = [*value.value, *added.value]


def _is_empty(node: Node) -> bool:
    """Whether nothing was written; llama-swap does not take the word `null` for that."""
    return isinstance(node, yaml.ScalarNode) and node.value == "" and node.tag.endswith(":null")
