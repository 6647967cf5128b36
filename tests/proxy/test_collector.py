"""What is there at the start is left alone by the collector, and what is new still collected."""

import gc
import weakref

from proxy.collector import spare_collector


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_what_is_there_is_frozen_and_new_cycles_are_still_found() -> None:
    before = gc.get_threshold()
    try:
        spare_collector()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold()[0] > before[0]
        assert gc.get_threshold()[1:] == before[1:]
        gone = weakref.ref(Cycle())
        gc.collect()
        assert gone() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
