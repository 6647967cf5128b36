"""One chunk is several objects: which ones, and when we must not guess."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_bridge.drivers.lmcache_keys import (
    CannotExpand,
    Layout,
    ObjectKey,
    batched,
    expand,
    layout_from_status,
    pack_kv_rank,
    unknown_objects,
)

KEYS = st.lists(st.binary(min_size=32, max_size=32), max_size=6, unique=True)
LAYOUTS = st.builds(
    lambda worlds, groups: Layout(world_sizes=worlds, object_groups=groups),
    st.frozensets(st.integers(1, 8), min_size=1, max_size=3),
    st.frozensets(st.integers(0, 3), min_size=1),
)


def status(model: str, world: int, groups: list[int], table: str = "cache_context_meta") -> dict[str, object]:
    """The part of a cache server's `GET /status` that names its engine workers, one entry a worker."""
    layout = {"cache_size_per_token": 100, "kernel_groups": [{"object_group_idx": group} for group in groups]}
    meta = {"model_name": model, "world_size": world, "kv_cache_layout": layout}
    return {table: {str(worker): meta for worker in range(world)}}


@given(KEYS, LAYOUTS)
def test_every_chunk_becomes_the_same_number_of_distinct_objects(keys: list[bytes], layout: Layout) -> None:
    objects = expand(keys, "m", "s", layout)
    assert len(objects) == len(set(objects)) == len(keys) * layout.objects_per_chunk()
    assert list(dict.fromkeys(each.chunk_key for each in objects)) == keys
    assert unknown_objects(objects, layout) == []


@given(LAYOUTS, st.integers(1, 64))
def test_objects_of_another_world_or_group_are_noticed(layout: Layout, world: int) -> None:
    stranger = ObjectKey("00" * 32, "m", pack_kv_rank(world, 0), 0)
    group = ObjectKey("00" * 32, "m", layout.kv_ranks()[0], 9)
    known = world in layout.world_sizes and 0 in layout.object_groups
    assert (unknown_objects([stranger], layout) == []) is known
    assert unknown_objects([group], layout) == [group]


def test_a_rank_of_one_gpu_is_a_byte_each_for_world_and_rank_twice() -> None:
    assert pack_kv_rank(1, 0) == 0x01000100
    assert pack_kv_rank(4, 3) == 0x04030403


def test_layout_is_the_union_over_servers_and_tables() -> None:
    layout = layout_from_status([status("m", 2, [0, 1]), status("m", 4, [0], "non_cuda_context_meta")], "m")
    assert layout.world_sizes == {2, 4}
    assert layout.object_groups == {0, 1}
    assert layout.bytes_per_token == 400


@pytest.mark.parametrize("statuses", [[], [{}], [status("another", 1, [0])]])
def test_an_unknown_model_is_refused_with_its_name(statuses: list[dict[str, object]]) -> None:
    with pytest.raises(CannotExpand, match="'m'"):
        layout_from_status(statuses, "m")


def test_a_server_that_names_no_groups_has_one() -> None:
    assert layout_from_status([status("m", 1, [])], "m").object_groups == {0}


@given(st.lists(st.integers()), st.integers(1, 10))
def test_batches_are_bounded_and_lose_nothing(items: list[int], size: int) -> None:
    batches = list(batched(items, size))
    assert [item for batch in batches for item in batch] == items
    assert all(0 < len(batch) <= size for batch in batches)
