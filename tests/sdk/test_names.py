"""The SDK's names are the proxy's, and every name it sends is one that the proxy takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtether import names
from lifecycle import vocabulary
from proxy import lifecycle_fields, operations, ops_api


def test_the_names_of_the_wire_are_the_proxys():
    wire = [n for n in vars(names) if n.endswith(("_HEADER", "_FIELD"))]
    assert {n: getattr(names, n) for n in wire} == {n: getattr(vocabulary, n) for n in wire}
    assert len(wire) == 5
    assert names.OPS_PATH == ops_api.OPS_PATH


def test_the_limits_are_the_proxys():
    assert names.MAX_NAME_LENGTH == operations.MAX_CONTEXT_LENGTH == operations.MAX_LABEL_LENGTH
    assert names.MAX_HEADER_BYTES == lifecycle_fields.MAX_HEADER_BYTES
    assert names.MAX_RIDING_BYTES == lifecycle_fields.MAX_BODY_OPS_BYTES


@given(st.text(min_size=1, max_size=600))
def test_every_text_gives_an_id_that_the_proxy_takes(text):
    name = names.context_id(text)
    assert operations.is_context_id(name)
    assert names.context_id(name) == name


@given(st.text(min_size=1, max_size=600))
def test_every_text_gives_a_label_that_the_proxy_takes(text):
    assert operations.is_label(names.label(text), operations.MAX_LABEL_LENGTH)


def test_ids_stay_what_they_are_where_they_can():
    assert names.context_id("run-7:main ünïcode") == "run-7:main ünïcode"
    assert names.context_id("src/a.py\n") == "src%2Fa.py%0A"
    assert names.context_id("x" * 300) != names.context_id("x" * 301)


def test_nothing_is_no_name():
    with pytest.raises(ValueError, match="at least one"):
        names.context_id("")
