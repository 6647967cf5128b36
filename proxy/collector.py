"""Python's collector of cyclic garbage, for a process that lives long and keeps large books."""

import gc

_YOUNG_OBJECTS = 2_500
"""Objects made and not freed before the youngest are looked at. A call makes some hundreds that stay a while:
at Python's own 700 looking took 0.07 ms of each call's CPU time. At 10,000 a look held every call up for
5 ms, and a look at the ones that are older, one in ten, for 35 ms."""


def spare_collector() -> None:
    """Never look again at what is there now, code and books alike, and look less often at what is new.

    A look at everything takes a tenth of a second and more, in which no call goes on.
    """
    gc.collect()
    gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS, *older)
