"""How many heaps the C library's allocator keeps for the threads of this process."""

import ctypes

MAX_ARENAS = 2
"""One for the event loop and one for the threads that tokenise."""

_M_ARENA_MAX = -8
"""The number of this setting in glibc's <malloc.h>."""


def bound_arenas() -> None:
    """Let threads share heaps; to be called before there are any. Does nothing without glibc.

    By default each thread gets one of its own, up to eight a processor, and what is free in one serves no
    other thread: half an hour of mapping left 200 of 300 MiB free and unusable (docs/performance.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, MAX_ARENAS)
