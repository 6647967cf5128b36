"""The engine's events carry what the gate in front of it reads; `test_event_stream` reads them."""

import typing

from engine_bridge.sim.event_stream import encode_event
from engine_bridge.sim.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineRestarted, KvEvent


def test_every_event_but_a_restart_has_a_form_on_the_wire():
    stored = BlockStored(
        block_hashes=(b"\1" * 32,), parent_block_hash=None, token_ids=(1,), block_size=1, medium="CPU"
    )
    sent = [stored, BlockRemoved(block_hashes=(b"\1" * 32,), medium="GPU"), AllBlocksCleared()]
    assert {type(each) for each in sent} | {EngineRestarted} == set(typing.get_args(KvEvent))
    assert [encode_event(each)["type"] for each in sent] == [type(each).__name__ for each in sent]
