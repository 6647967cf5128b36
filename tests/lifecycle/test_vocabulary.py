"""Names that other parts rely on: importable everywhere, each once, fit for the wire."""

import inspect
import subprocess
import sys
from enum import StrEnum

from lifecycle import vocabulary

ENUMS = [
    e
    for _, e in inspect.getmembers(vocabulary, inspect.isclass)
    if issubclass(e, StrEnum) and e is not StrEnum
]
HEADERS = [v for n, v in vars(vocabulary).items() if n.endswith("_HEADER")]


def test_it_needs_the_standard_library_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import lifecycle.vocabulary; "
        "print(sorted({m.partition('.')[0] for m in set(sys.modules) - before} - sys.stdlib_module_names))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "['lifecycle']"


def test_values_are_lower_case_and_each_once() -> None:
    for enum in ENUMS:
        values = [member.value for member in enum]
        assert values == [v.lower() for v in values], enum
        assert len(set(values)) == len(values) > 1, enum
    assert all(h == h.lower() and h.startswith("x-kv-") for h in HEADERS)
    assert len(set(HEADERS)) == len(HEADERS) >= 7


def test_every_wait_has_a_lease() -> None:
    assert set(vocabulary.LEASE_SECONDS) == set(vocabulary.WaitKind)
    assert vocabulary.PIN_TTL_DEFAULT_SECONDS <= vocabulary.PIN_TTL_MAX_SECONDS
