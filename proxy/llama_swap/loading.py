"""From the text of llama-swap's configuration to `LlamaSwapConfig`, or to every mistake at once.

file or directory ─► sources.py ─► macros.py ─► entries.py, routing.py ─► checks.py ─► LlamaSwapConfig
                       └ environment.py, go_yaml.py    └ fields.py, expressions.py
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.errors import SettingsError
from proxy.llama_swap import entries
from proxy.llama_swap.checks import check_aliases, check_names
from proxy.llama_swap.fields import Fields
from proxy.llama_swap.macros import with_macros
from proxy.llama_swap.model import LlamaSwapConfig
from proxy.llama_swap.routing import read_routing
from proxy.llama_swap.sources import read_sources, read_text

_KEYS = frozenset(
    (
        *("healthCheckTimeout", "logRequests", "logLevel", "logTimeFormat", "logToStdout", "metricsMaxInMemory"),
        *("captureBuffer", "store", "ui", "performance", "globalTTL", "unloadTimeout", "models", "profiles"),
        *("selectors", "routing", "groups", "matrix", "macros", "startPort", "hooks", "sendLoadingState"),
        *("includeAliasesInList", "apiKeys", "peers", "upstream"),
    )
)


def load(path: Path, environ: Mapping[str, str]) -> LlamaSwapConfig:
    """The configuration in the file, or in the directory of files, at `path`. Raises SettingsError."""
    return _checked(read_sources(path, environ), str(path))


def parse(text: str, environ: Mapping[str, str]) -> LlamaSwapConfig:
    """The configuration in `text`. Raises SettingsError."""
    return _checked(read_text(text, environ), "llama-swap's configuration")


def _checked(tree: dict[str, Any], name: str) -> LlamaSwapConfig:
    fields = Fields()
    raw = with_macros(tree, fields.problems)
    fields.unknown(raw, _KEYS, "")
    models = entries.read_models(raw.get("models"), fields)
    check_aliases(models, fields)
    routing, router = read_routing(raw, models, fields)
    config = LlamaSwapConfig(
        models=models,
        selectors=entries.read_selectors(raw.get("selectors"), fields),
        profiles=entries.read_profiles(raw.get("profiles"), fields),
        peers=entries.read_peers(raw.get("peers"), fields),
        api_keys=entries.read_api_keys(raw.get("apiKeys"), fields),
        ignore_paths=entries.read_ignored_paths(raw.get("upstream"), fields),
        routing=routing,
        router=router,
        notes=tuple(dict.fromkeys(fields.notes)),
    )
    if not fields.problems:
        check_names(config, raw, fields)
    if fields.problems:
        raise SettingsError([f"{name}: {problem}" for problem in dict.fromkeys(fields.problems)])
    return config
