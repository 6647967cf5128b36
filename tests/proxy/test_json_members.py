"""Members and elements are found where a JSON parser finds them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.json_members import NotScannable, scan_array, scan_object

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(st.characters(codec=None)), v, max_size=4),
)
layouts = st.sampled_from([None, 0, 2])


@given(st.dictionaries(st.text(st.characters(codec=None)), json_values), layouts, st.booleans())
def test_an_objects_members(document: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=ascii_only)
    data = text.encode("utf-8", "surrogatepass")
    found = scan_object(data)
    assert (found.start, found.end) == (0, len(data))
    values = [json.loads(data[m.value_start : m.end]) for m in found.members]
    assert [m.name for m in found.members] == list(document)
    assert repr(values) == repr([json.loads(json.dumps(value)) for value in document.values()])


@given(st.lists(json_values), layouts)
def test_an_arrays_elements(document: list[Any], indent: int | None) -> None:
    data = json.dumps(document, indent=indent).encode()
    assert repr([json.loads(data[a:b]) for a, b in scan_array(data)]) == repr(json.loads(data))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b'{"a"',
        b'{"a":',
        b'{"a":1',
        b'{"a":1,',
        b'{"a":1,}',
        b'{"a" 1}',
        b"{a:1}",
        b'{"a":"x',
        b'{"a":[1}',
        b'{"a":1 2}',
    ],
)
def test_what_is_no_whole_object(data: bytes) -> None:
    with pytest.raises(NotScannable):
        scan_object(data)


@given(st.binary())
def test_bytes_never_do_anything_else(data: bytes) -> None:
    for scan in (scan_object, scan_array):
        try:
            scan(data)
        except NotScannable:
            continue
