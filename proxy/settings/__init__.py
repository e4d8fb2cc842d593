"""The settings: read once at the edge, checked and frozen. Nothing else in this package reads the environment.

environ ─► environment.py ─┐
                           ├─► layers.py ─► loading.py ─► model.Settings, or SettingsError with every mistake
file ────► yaml_file.py ───┘                  └─ values.py, units.py: what each value may be
"""

from proxy.settings.loading import load, read
from proxy.settings.model import BUILT_IN_CLASSES, ClassSettings, Lease, Settings

__all__ = ["BUILT_IN_CLASSES", "ClassSettings", "Lease", "Settings", "load", "read"]
