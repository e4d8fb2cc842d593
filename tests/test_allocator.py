"""What the C library is told. That it pays is measured by the bench."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from proxy.allocator import keep_memory

MAPPED = """
import ctypes
from proxy.allocator import keep_memory
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
if {kept}: keep_memory()
before = sum(1 for _ in open("/proc/self/maps"))
held = [libc.malloc(512 * 1024) for _ in range(50)]
print(sum(1 for _ in open("/proc/self/maps")) - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this machine's C library is not glibc")
def test_what_is_read_into_is_no_longer_mapped_for_each_read() -> None:
    def mappings(*, kept: bool) -> int:
        done = subprocess.run([sys.executable, "-c", MAPPED.format(kept=kept)], capture_output=True, check=True)
        return int(done.stdout)

    assert mappings(kept=True) <= 2


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    keep_memory()
