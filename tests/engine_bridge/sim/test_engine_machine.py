"""The whole embedded engine against what may be said of any cache, and against its own twin."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_bridge.sim.block_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineRestarted
from engine_bridge.sim.engine import SimEngine
from engine_bridge.sim.requests import AbortedOutput, FinishedOutput, TokenOutput
from lifecycle.vocabulary import Tier
from tests.engine_bridge.sim.toy_engine import config, drain, ended, keys_of, request

BOTH = frozenset({Tier.L1, Tier.L2})
SALTS = ("", "other")
TRUNKS = [[number] * 4 for number in range(3)]
prompts = st.lists(st.sampled_from(TRUNKS), min_size=1, max_size=8).map(
    lambda parts: [token for part in parts for token in part]
)
SLOW = dict.fromkeys(
    (f"hardware_{name}_bandwidth" for name in ("load", "store", "l2_read", "l2_write")), 8_000_000
)
SMALL = config(
    hardware_hbm_bytes=4 * 12,
    l1_bytes=8 * 8,
    l2_bytes=8 * 6,
    max_num_seqs=2,
    max_batched_tokens=12,
    hardware_load_latency_ns=300,
    hardware_l2_latency_ns=300,
    **SLOW,
)
"""Little room everywhere, and transfers that take as long as steps do."""


class Ear:
    """What the KV events say is there."""

    def __init__(self):
        self.engine, self.cpu, self.told = Counter(), set(), []

    def __call__(self, at_ns, events):
        for event in events:
            self.told.append((at_ns, event))
            match event:
                case BlockStored(medium="GPU"):
                    assert event.parent_block_hash is None or self.engine[event.parent_block_hash]
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                    self.engine.update(event.block_hashes)
                case BlockStored():
                    self.cpu.update(event.block_hashes)
                case BlockRemoved(medium="GPU"):
                    assert self.engine >= Counter(event.block_hashes)
                    self.engine.subtract(event.block_hashes)
                case BlockRemoved():
                    self.cpu.difference_update(event.block_hashes)
                case AllBlocksCleared() | EngineRestarted():
                    self.engine.clear()


class EngineMachine(RuleBasedStateMachine):
    """Every call goes to two engines; the twin is looked at more often on the way."""

    def __init__(self):
        super().__init__()
        self.ear, self.twin_ear = Ear(), Ear()
        self.engine = SimEngine(SMALL, [self.ear])
        self.twin = SimEngine(SMALL, [self.twin_ear])
        self.outputs, self.twin_outputs = [], []
        self.requests = {}
        self.open = set()
        self.pinned = {salt: {} for salt in SALTS}
        self.kept = set()
        self.keys = {salt: {} for salt in SALTS}

    @property
    def now_ns(self):
        return self.engine.now_ns

    def both(self, call):
        answers = call(self.engine), call(self.twin)
        assert answers[0] == answers[1]
        return answers[0]

    @rule(
        prompt=prompts,
        num_output=st.integers(1, 6),
        salt=st.sampled_from(SALTS),
        limit=st.none() | st.integers(0, 32),
        saves=st.booleans(),
    )
    def submit(self, prompt, num_output, salt, limit, saves):
        name = f"r{len(self.requests)}"
        asked = request(
            name, prompt, num_output, salt=salt, store_until=limit, save_generated=saves, session_id=name
        )
        self.both(lambda engine: engine.submit(asked, self.now_ns))
        self.requests[name] = asked
        self.open.add(name)
        for key in keys_of([*asked.token_ids, *asked.output_ids]):
            self.keys[salt][key] = None

    @rule(ns=st.sampled_from([500, 2_000, 12_000]))
    def let_time_pass(self, ns):
        start = self.now_ns
        self.outputs += self.engine.step(start + ns)
        for part in (ns // 3, ns // 2, ns):
            self.twin_outputs += self.twin.step(start + part)

    @rule()
    def come_to_rest(self):
        self.outputs += drain(self.engine)
        self.twin_outputs += drain(self.twin)
        self.twin_outputs += self.twin.step(self.now_ns)
        self.outputs += self.engine.step(self.twin.now_ns)
        assert not self.open - {each.request_id for each in ended(self.outputs)}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.open)))
        self.both(lambda engine: engine.abort(name, self.now_ns))
        assert not self.both(lambda engine: engine.abort(name, self.now_ns))

    def draw_keys(self, data, salt):
        known = [*self.keys[salt], bytes(32)]
        return data.draw(st.lists(st.sampled_from(known), max_size=6))

    @rule(
        data=st.data(),
        salt=st.sampled_from(SALTS),
        tiers=st.sampled_from([BOTH, *map(frozenset, [{Tier.L1}, {Tier.L2}])]),
    )
    def delete(self, data, salt, tiers):
        keys = self.draw_keys(data, salt)
        before = self.engine.locate(salt, keys, self.now_ns)
        answer = self.both(lambda engine: engine.delete(salt, keys, tiers, self.now_ns))
        after = self.engine.locate(salt, keys, self.now_ns)
        kinds = [answer.deleted, answer.in_use, answer.pinned, answer.absent]
        assert sorted(key for kind in kinds for key in kind) == sorted(set(keys))
        for key, was, now in zip(keys, before, after, strict=True):
            assert now == (was - tiers if key in answer.deleted else was)
        again = self.both(lambda engine: engine.delete(salt, keys, tiers, self.now_ns))
        assert (again.deleted, again.in_use, again.pinned) == ((), answer.in_use, answer.pinned)

    @rule(data=st.data(), salt=st.sampled_from(SALTS))
    def pin(self, data, salt):
        keys = self.draw_keys(data, salt)
        self.both(lambda engine: engine.pin(salt, keys, self.now_ns))
        for key in keys:
            self.pinned[salt][key] = self.pinned[salt].get(key, 0) + 1

    @rule(data=st.data(), salt=st.sampled_from(SALTS))
    def unpin(self, data, salt):
        keys = self.draw_keys(data, salt)
        self.both(lambda engine: engine.unpin(salt, keys, self.now_ns))
        for key in keys:
            count = self.pinned[salt].pop(key, 0)
            if count > 1:
                self.pinned[salt][key] = count - 1
            else:
                self.kept.discard((salt, key))

    @rule(data=st.data(), salt=st.sampled_from(SALTS))
    def prefetch(self, data, salt):
        keys = self.draw_keys(data, salt)
        evicted = self.engine.stats(self.now_ns).tiers[Tier.L1].num_evicted
        self.both(lambda engine: engine.prefetch(salt, keys, self.now_ns))
        assert self.engine.stats(self.now_ns).tiers[Tier.L1].num_evicted == evicted

    @rule()
    def restart_engine(self):
        self.both(lambda engine: engine.restart_engine(self.now_ns))
        stats = self.engine.stats(self.now_ns)
        assert stats.tiers[Tier.GPU].num_chunks == stats.num_running == stats.num_waiting == 0

    @rule()
    def restart_cache(self):
        below = {salt: self.engine.locate(salt, list(self.keys[salt]), self.now_ns) for salt in SALTS}
        self.both(lambda engine: engine.restart_cache(self.now_ns))
        for salt in SALTS:
            now = self.engine.locate(salt, list(self.keys[salt]), self.now_ns)
            assert now == [tiers - {Tier.L1} for tiers in below[salt]]

    @rule()
    def reset_prefix_cache(self):
        if self.both(lambda engine: engine.reset_prefix_cache(self.now_ns)):
            assert self.engine.stats(self.now_ns).tiers[Tier.GPU].num_chunks == 0

    @invariant()
    def bytes_add_up_and_stay_below_capacity(self):
        for tier, usage in self.engine.stats(self.now_ns).tiers.items():
            size = 4 if tier is Tier.GPU else 8
            own = 0 if tier is Tier.GPU else usage.reserved_bytes
            assert usage.used_bytes == usage.num_chunks * size + own
            assert usage.used_bytes <= usage.capacity_bytes
            assert 0 <= usage.reserved_bytes <= usage.capacity_bytes

    @invariant()
    def the_events_tell_the_truth(self):
        assert self.ear.engine.total() == self.engine.stats(self.now_ns).tiers[Tier.GPU].num_chunks
        found = set()
        for salt in SALTS:
            known = list(self.keys[salt])
            places = self.engine.locate(salt, known, self.now_ns)
            found |= {key for key, tiers in zip(known, places, strict=True) if Tier.L1 in tiers}
        # An engine that ended does not report what it had begun to store; a prefetch is never reported.
        assert self.ear.cpu - found <= self.shared_keys()

    def shared_keys(self):
        """Keys that lie under both salts: an event does not say under which."""
        return set(self.keys[""]) & set(self.keys["other"])

    @invariant()
    def what_is_pinned_does_not_leave_l2(self):
        for salt in SALTS:
            held = list(self.pinned[salt])
            assert self.engine.pins(salt) == self.pinned[salt]
            places = self.engine.locate(salt, held, self.now_ns)
            there = {(salt, key) for key, tiers in zip(held, places, strict=True) if Tier.L2 in tiers}
            assert {each for each in self.kept if each[0] == salt} <= there
            self.kept |= there

    @invariant()
    def each_request_ends_once_with_its_tokens_in_order(self):
        ends = [each.request_id for each in ended(self.outputs)]
        assert len(ends) == len(set(ends))
        self.open -= set(ends)
        said = {}
        for output in self.outputs:
            tokens = said.setdefault(output.request_id, [])
            asked = self.requests[output.request_id]
            match output:
                case TokenOutput():
                    assert output.index == len(tokens)
                    tokens.append(output.token_id)
                case FinishedOutput():
                    assert tokens == list(asked.output_ids)
                case AbortedOutput():
                    assert tokens == list(asked.output_ids)[: len(tokens)]

    @invariant()
    def nothing_is_called_cached_that_was_not_computed_before(self):
        """Checked as requests end: a hit is a prefix of an earlier request's tokens under the same salt."""
        for end in ended(self.outputs):
            asked = self.requests[end.request_id]
            cached = end.usage.cached_tokens
            assert cached < len(asked.token_ids)
            others = [
                [*each.token_ids, *each.output_ids]
                for each in self.requests.values()
                if each.request_id != asked.request_id and each.salt == asked.salt
            ]
            prefix = list(asked.token_ids[:cached])
            assert not cached or any(each[:cached] == prefix for each in others)

    @invariant()
    def being_looked_at_changes_nothing(self):
        assert self.outputs == self.twin_outputs
        assert self.ear.told == self.twin_ear.told
        assert self.engine.stats(self.now_ns) == self.twin.stats(self.now_ns)

    def teardown(self):
        self.come_to_rest()
        stats = self.engine.stats(self.now_ns)
        assert all(usage.reserved_bytes == 0 for usage in stats.tiers.values())
        for salt in SALTS:
            answer = self.engine.delete(salt, list(self.keys[salt]), BOTH, self.now_ns)
            assert answer.in_use == ()


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestEngineMachine = EngineMachine.TestCase
