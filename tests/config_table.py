"""The table of `check` for a llama-swap configuration.

In a test: `print(config_table(text))`. By hand: `python tests/config_table.py FILE_OR_DIRECTORY`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.check import models_table
from proxy.classify import Classifier
from proxy.llama_swap import LlamaSwapConfig, load, parse
from proxy.settings import Settings


def config_table(config: str | Path | LlamaSwapConfig, environ: Mapping[str, str] | None = None, **values: Any) -> str:
    """Each model of `config` with class, lease, slots and the reasons; `values` are settings of the proxy."""
    environ = {} if environ is None else environ
    if isinstance(config, Path):
        config = load(config, environ)
    elif isinstance(config, str):
        config = parse(config, environ)
    return "\n".join(models_table(Classifier(Settings.model_validate(values), config=config)))


if __name__ == "__main__":
    print(config_table(Path(sys.argv[1]), os.environ))
