"""llama-swap's configuration and listing, as far as they decide what a request loads, stops and needs.

file or directory ─► loading.load ─► LlamaSwapConfig ─► Catalog.from_config ─┐
GET /v1/models ────────────────────► catalog_from_listing ───────────────────┴─► Catalog.resolve(name) ─► Resolution

All of it is pure but for the reading of the files.
"""

from proxy.llama_swap.catalog import Catalog, Resolution, UpstreamMatch
from proxy.llama_swap.evidence import capability_class
from proxy.llama_swap.listing import catalog_from_listing
from proxy.llama_swap.loading import load, parse
from proxy.llama_swap.model import Capabilities, LlamaSwapConfig, LocalModel, Selector
from proxy.llama_swap.modes import ModeDecision, lease_mode

__all__ = [
    "Capabilities",
    "Catalog",
    "LlamaSwapConfig",
    "LocalModel",
    "ModeDecision",
    "Resolution",
    "Selector",
    "UpstreamMatch",
    "capability_class",
    "catalog_from_listing",
    "lease_mode",
    "load",
    "parse",
]
