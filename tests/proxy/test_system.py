"""The clock goes with the machine's; ids say of what they are and never repeat."""

import time

from proxy.system import RandomIds, SystemClock


def test_the_clock_is_the_machines() -> None:
    before = time.time_ns()
    assert before <= SystemClock().now_ns() <= time.time_ns()


def test_ids_are_fresh_and_fit_into_urls_and_headers() -> None:
    ids = [RandomIds().new("ctx") for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(i.startswith("ctx_") and i.isascii() and "/" not in i and i.isprintable() for i in ids)
