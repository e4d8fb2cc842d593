"""A llama-swap look-alike, for the demo, the tests and the benchmarks.

It answers like llama-swap with scripted model servers behind it: the same routes, names, errors and
streams, and above all the same scheduling, with loads and answers that only take time. It shares no code
with the proxy, because it is the oracle the proxy's router and lock are tested against: both are written
from what llama-swap was measured to do, and neither from the other.

What goes on inside is to be seen under `/_sim/` (see `journal.py`), which llama-swap itself does not have.
"""

from proxy.simulator.app import create_app
from proxy.simulator.config import Config, ConfigError, default_config, load_config, parse_config
from proxy.simulator.eviction import stopped_by

__all__ = [
    "Config",
    "ConfigError",
    "create_app",
    "default_config",
    "load_config",
    "parse_config",
    "stopped_by",
]
