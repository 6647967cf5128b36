"""The reports name what the wire form needs."""

import msgspec
import pytest

from engine_bridge.sim.block_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineRestarted


def test_the_fields_are_those_that_vllm_sends():
    """Names and order of vLLM 0.32.0, `distributed/kv_events.py`, of those that are not always None."""
    assert BlockStored.__struct_fields__[:5] == (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "medium",
    )
    assert BlockRemoved.__struct_fields__ == ("block_hashes", "medium")
    assert AllBlocksCleared.__struct_fields__ == ()


def test_reports_cannot_be_changed_by_a_listener():
    with pytest.raises(AttributeError):
        EngineRestarted(incarnation=2).incarnation = 3
    stored = BlockStored(
        block_hashes=(b"a",), parent_block_hash=None, token_ids=(1,), block_size=1, medium="GPU"
    )
    assert msgspec.structs.replace(stored, medium="CPU").session_id is None
