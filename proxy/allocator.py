"""How the C library keeps memory for the next read.

The event loop reads into buffers of 256 KiB. glibc maps each anew from the kernel and gives it back at once, which
was measured as a third of the CPU of a large download and a sixth of an upload. Told to keep a little, it does not.
"""

from __future__ import annotations

import contextlib
import ctypes

MIB = 1024 * 1024

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""glibc's <malloc.h>."""

KEPT = ((M_MMAP_THRESHOLD, 4 * MIB), (M_TRIM_THRESHOLD, 16 * MIB), (M_TOP_PAD, MIB))
"""Below the first size memory is not mapped by itself; of what is free at the end, so much stays."""


def keep_memory() -> None:
    """Keep free memory for the next buffers. Does nothing where the C library is not glibc."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in KEPT:
            mallopt(option, size)
