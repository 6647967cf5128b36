"""Random lives of several contexts, decided by the core and told to a brute-force model: both must agree.

After each step every context holds exactly what the model holds, however it came there.
"""

from collections import Counter

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from lifecycle.core.digest import digest
from lifecycle.core.directives import Reclaim
from lifecycle.core.evolve import evolve
from lifecycle.core.ids import split_keys
from lifecycle.core.plan import plan_reclaim
from lifecycle.core.state import ContextState, list_path, version_states
from lifecycle.store.codec import decode, encode
from lifecycle.vocabulary import VersionState
from tests.lifecycle.core.lifecycle_steps import BY_DIGEST, Steps
from tests.lifecycle.core.story import NAMESPACE


class Lives(Steps):
    """The machine: every step, and what must hold after it."""

    @invariant()
    def both_hold_the_same(self) -> None:
        for twin in self.twins:
            state = twin.story.state
            states = version_states(state)
            mine: Counter[tuple[tuple[str, ...], VersionState]] = Counter()
            for version in state.versions.values():
                if version.index >= 0:
                    spelled = tuple(BY_DIGEST[v.digest] for v in list_path(state, version.id))
                    mine[spelled, states[version.id]] += 1
            theirs: Counter[tuple[tuple[str, ...], VersionState]] = Counter()
            for node, as_state in twin.model.live().items():
                if node.kind == "message":
                    theirs[node.words()[1:], as_state] += 1
            assert mine == theirs
            assert len(state.versions) == len(twin.model.live())
            assert state.open == twin.model.open
            assert bool(state.gap) == twin.model.gap

    @invariant()
    def references_are_a_recount(self) -> None:
        mine: Counter[bytes] = Counter()
        theirs: Counter[bytes] = Counter()
        for twin in self.twins:
            for version in twin.story.state.versions.values():
                mine.update(version.keys[i : i + 32] for i in range(0, len(version.keys), 32))
            theirs += twin.model.references()
        assert mine == theirs
        for key in self.stored:
            assert self.index.references(NAMESPACE, key) == mine[key]

    @invariant()
    def what_is_reclaimed_is_dead_in_every_context_and_all_that_is_dead_is(self) -> None:
        plan = plan_reclaim(self.index, NAMESPACE, self.now, 0, "d", lambda owner: True)
        live = {key for twin in self.twins for key in twin.model.references()}
        unknown = any(not c.mapped for twin in self.twins for c in twin.model.calls)
        assert plan is None or not set(split_keys(plan.keys)) & live
        if isinstance(plan, Reclaim) and not unknown:
            assert set(split_keys(plan.keys)) == self.stored - live
        elif plan is None and not unknown:
            assert self.stored <= live
        for twin in self.twins:
            calls = twin.model.calls if twin.model.open else []
            lists = [x.tip for x in twin.model.lines] + [c.answer.tail for c in calls]
            if not unknown and any(end.tokens is None for end in lists):
                assert not isinstance(plan, Reclaim)

    @invariant()
    def calls_and_pins_and_the_last_list_are_live(self) -> None:
        for twin in self.twins:
            state = twin.story.state
            for flight in state.flights:
                sent = twin.story.lists[flight.call_id, flight.attempt]
                held = [BY_DIGEST[v.digest] for v in list_path(state, flight.tip)]
                assert held == sent
            for hold in state.pins:
                assert state.versions[hold.tip].mapped

    @invariant()
    def time_never_runs_backwards(self) -> None:
        for twin in self.twins:
            stamps = [e.at_ns for e in twin.story.events]
            assert stamps == sorted(stamps)

    def teardown(self) -> None:
        for twin in self.twins:
            story = twin.story
            state: ContextState | None = None
            for event in story.events:
                state = evolve(state, decode(encode(event)))
            assert state == story.state
            assert digest(state) == digest(story.state)
            for cut, snapshot in twin.snapshots:
                state = msgspec.msgpack.decode(snapshot, type=ContextState)
                for event in story.events[cut:]:
                    state = evolve(state, event)
                assert state == story.state
        for twin in self.twins:
            story = twin.story
            story.now = self.now
            for name, attempt in twin.in_flight():
                story.end(name, attempt)
            story.close()
            story.tick(3601)
            assert story.state.versions == {}
            assert not story.state.branches


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
