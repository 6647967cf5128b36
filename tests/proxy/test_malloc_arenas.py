"""Threads share heaps, where the C library would give each its own."""

import os
import platform
import subprocess
import sys

import pytest

THREADS = """
import ctypes, sys, tempfile, threading
from proxy.malloc_arenas import bound_arenas
if sys.argv[1] == "bound":
    bound_arenas()
barrier = threading.Barrier(8)
def work():
    barrier.wait()
    kept = [bytearray(10_000) for _ in range(100)]
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.fclose.argtypes = [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
with tempfile.NamedTemporaryFile() as told:
    file = libc.fopen(told.name.encode(), b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(told.read().count(b"<heap nr="))
"""


def num_heaps(bound: str) -> int:
    """Heaps of a process with eight threads that allocate at the same time."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", THREADS, bound]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="heaps are glibc's")
def test_eight_threads_share_two_heaps() -> None:
    assert num_heaps("unbound") > 2
    assert num_heaps("bound") <= 2
