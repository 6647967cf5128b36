"""A made-up workload does everything that recorded agents do, and the same each time."""

from collections import Counter

from engine_bridge.sim.traces.calls import ChangeKind, Role
from engine_bridge.sim.traces.generated import Workload, generated


def test_agents_read_compact_rewrite_fork_spawn_and_close() -> None:
    calls = list(generated(Workload(num_sessions=30)))
    changes = Counter(change.kind for call in calls for change in call.before)
    assert set(changes) == set(ChangeKind) - {ChangeKind.REMOVE}
    assert 0 < changes[ChangeKind.ONE_OFF] < changes[ChangeKind.FORK]
    spawned = {(c.session, c.context) for c in calls if c.before[0].kind is ChangeKind.CREATE} - {
        (c.session, 0) for c in calls
    }
    assert spawned
    contexts = {(c.session, c.context) for c in calls}
    assert {(c.session, c.context) for c in calls if c.closes} == contexts
    assert {c.waits_for for c in calls} == {"tool", "human", "end"}
    for call in calls:
        assert (call.waits_for == "tool") == bool(call.tools)
        assert call.is_one_off <= call.closes


def test_a_summary_stands_where_the_turns_were_and_the_list_is_short_again() -> None:
    workload = Workload(num_sessions=10)
    calls = list(generated(workload))
    compactions = [call for call in calls if call.is_one_off]
    assert compactions
    for one_off in compactions:
        after = next(c for c in calls if (c.session, c.index) == (one_off.session, one_off.index + 1))
        assert [change.kind for change in after.before] == [ChangeKind.REPLACE, ChangeKind.APPEND]
        assert after.num_tokens < one_off.num_tokens / 2
        assert after.messages[:2] == one_off.messages[:2], "tools and system prompt stay"


def test_sessions_of_a_kind_share_their_head_and_nothing_else() -> None:
    calls = list(generated(Workload(num_sessions=6, num_kinds=2)))
    firsts = [call.messages for call in calls if call.index == 0]
    assert len({messages[:2] for messages in firsts}) == 2
    assert [message.role for message in firsts[0]] == [Role.TOOL, Role.SYSTEM, Role.USER]
    owners = Counter(
        message_id for messages in firsts for message_id in {message.id for message in messages[2:]}
    )
    assert set(owners.values()) == {1}


def test_one_seed_is_one_workload() -> None:
    assert list(generated(Workload(seed=3))) == list(generated(Workload(seed=3)))
    assert list(generated(Workload(seed=3))) != list(generated(Workload(seed=4)))
