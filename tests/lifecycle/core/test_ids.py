"""Names: what a context is, what its streams are called, where a run of keys is cut."""

from hypothesis import given
from hypothesis import strategies as st

from lifecycle.core.ids import KEY_BYTES, ContextKey, Namespace, context_stream, split_keys


@given(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=9))
def test_a_run_is_cut_into_the_keys_it_was_made_of(keys: list[bytes]) -> None:
    assert split_keys(b"".join(keys)) == keys


def test_streams_of_different_things_have_different_names() -> None:
    streams = {
        context_stream("a"),
        context_stream("b"),
        Namespace("model").stream(),
        Namespace("model", "salt").stream(),
        Namespace("model", "", "salt").stream(),
        Namespace("other").stream(),
    }
    assert len(streams) == 6


def test_the_same_name_of_another_tenant_is_another_context() -> None:
    assert ContextKey("one", "x") != ContextKey("two", "x")
    assert str(ContextKey("one", "x")) == "one/x"
