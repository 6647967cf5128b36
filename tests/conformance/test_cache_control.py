"""What every `CacheControl` must do. An adapter subclasses the suite and says how KV gets into its cache.

The suite stores real chunks, asks for them to be reclaimed or demoted, and looks at what the cache then
says. It knows nothing of how a driver works.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import pytest

from engine_bridge.drivers.noop import NoCacheControl
from lifecycle.core.directives import Admit, Demote, Directive, DirectiveResult, Pin, Reclaim, Unpin
from lifecycle.core.ids import Namespace
from lifecycle.ports import CacheControl
from lifecycle.vocabulary import DirectiveOutcome, Tier

NAMESPACE = Namespace(model="tiny")
DIRECTIVES: tuple[Directive, ...] = (
    Admit(directive_id="a", namespace=NAMESPACE, reason="", call_id="c", bypass_from_token=0),
    Reclaim(directive_id="r", namespace=NAMESPACE, reason="", keys=bytes(32)),
    Demote(directive_id="d", namespace=NAMESPACE, reason="", keys=bytes(32)),
    Pin(directive_id="p", namespace=NAMESPACE, reason="", keys=bytes(32), pin_id="p", lease_until_ns=1),
    Unpin(directive_id="u", namespace=NAMESPACE, reason="", keys=bytes(32), pin_id="p"),
)


class Chain(Protocol):
    """KV of one prompt, as it was stored: its tokens and the keys of its full chunks."""

    token_ids: Sequence[int]
    keys: list[bytes]


class CacheSubject(Protocol):
    """A cache under test. `store` returns only when every chunk is in every tier that keeps copies."""

    control: CacheControl
    namespace: Namespace
    has_lower_tier: bool

    async def store(self, num_chunks: int, after: Chain | None = None) -> Chain: ...


def always(_: bytes) -> bool:
    return True


async def execute(
    subject: CacheSubject,
    directive: Directive,
    dead: set[bytes] | None = None,
    tokens: Sequence[int] | None = None,
) -> DirectiveResult:
    still_dead = always if dead is None else dead.__contains__
    return await subject.control.execute(directive, still_dead, lambda: tokens)


def reclaim(subject: CacheSubject, keys: Sequence[bytes]) -> Reclaim:
    return Reclaim(directive_id="r", namespace=subject.namespace, reason="test", keys=b"".join(keys))


def demote(subject: CacheSubject, keys: Sequence[bytes]) -> Demote:
    return Demote(directive_id="d", namespace=subject.namespace, reason="test", keys=b"".join(keys))


async def tiers(subject: CacheSubject, keys: Sequence[bytes]) -> list[frozenset[Tier]]:
    return [each.tiers for each in await subject.control.locate(subject.namespace, keys)]


class CacheControlSuite:
    """Subclasses provide the fixture `subject`."""

    async def test_every_directive_is_supported_or_says_why_not(self, subject: CacheSubject) -> None:
        capabilities = subject.control.capabilities
        for directive in DIRECTIVES:
            name = type(directive).__name__.lower()
            assert (name in capabilities.supported) != (name in capabilities.unsupported)
        assert all(capabilities.unsupported.values())

    async def test_unsupported_is_answered_with_its_reason(self, subject: CacheSubject) -> None:
        capabilities = subject.control.capabilities
        for directive in DIRECTIVES:
            if (reason := capabilities.unsupported.get(type(directive).__name__.lower())) is not None:
                result = await execute(subject, directive)
                assert (result.outcome, result.reason) == (DirectiveOutcome.UNSUPPORTED, reason)

    async def test_locate_answers_in_the_order_asked(self, subject: CacheSubject) -> None:
        chain = await subject.store(3)
        asked = [chain.keys[2], bytes(32), chain.keys[0], chain.keys[2]]
        answer = await subject.control.locate(subject.namespace, asked)
        assert [each.key for each in answer] == asked
        assert [bool(each.tiers) for each in answer] == [True, False, True, True]

    async def test_locate_of_nothing_is_nothing(self, subject: CacheSubject) -> None:
        assert list(await subject.control.locate(subject.namespace, [])) == []

    async def test_another_salt_holds_nothing(self, subject: CacheSubject) -> None:
        chain = await subject.store(2)
        elsewhere = Namespace(model=subject.namespace.model, salt="someone-else")
        assert not any(each.tiers for each in await subject.control.locate(elsewhere, chain.keys))

    async def test_reclaim_removes_exactly_the_keys(self, subject: CacheSubject) -> None:
        chain = await subject.store(4)
        before = await tiers(subject, chain.keys)
        result = await execute(subject, reclaim(subject, chain.keys[2:]))
        assert (result.outcome, result.applied, result.skipped) == (DirectiveOutcome.APPLIED, 2, 0)
        assert result.gone == b"".join(chain.keys[2:])
        assert await tiers(subject, chain.keys) == [*before[:2], frozenset(), frozenset()]

    async def test_reclaim_twice_changes_nothing(self, subject: CacheSubject) -> None:
        chain = await subject.store(3)
        first = await execute(subject, reclaim(subject, chain.keys[1:]))
        after = await tiers(subject, chain.keys)
        second = await execute(subject, reclaim(subject, chain.keys[1:]))
        assert (second.outcome, second.gone) == (first.outcome, first.gone)
        assert await tiers(subject, chain.keys) == after

    async def test_a_chunk_that_came_back_to_life_is_left_alone(self, subject: CacheSubject) -> None:
        chain = await subject.store(4)
        before = await tiers(subject, chain.keys)
        result = await execute(subject, reclaim(subject, chain.keys), dead={chain.keys[1], chain.keys[3]})
        assert result.outcome is DirectiveOutcome.APPLIED
        assert (result.applied, result.skipped) == (2, 2)
        assert result.gone == chain.keys[1] + chain.keys[3]
        assert await tiers(subject, chain.keys) == [before[0], frozenset(), before[2], frozenset()]

    async def test_reclaim_leaves_the_branch_that_shares_the_prefix(self, subject: CacheSubject) -> None:
        trunk = await subject.store(2)
        left = await subject.store(4, after=trunk)
        right = await subject.store(4, after=trunk)
        await execute(subject, reclaim(subject, left.keys[2:]))
        assert not any(await tiers(subject, left.keys[2:]))
        assert all(await tiers(subject, right.keys))

    async def test_reclaim_of_unknown_keys_is_applied_and_harmless(self, subject: CacheSubject) -> None:
        chain = await subject.store(1)
        result = await execute(subject, reclaim(subject, [bytes([7]) * 32]))
        assert result.outcome is DirectiveOutcome.APPLIED
        assert all(await tiers(subject, chain.keys))

    async def test_reclaim_of_no_keys(self, subject: CacheSubject) -> None:
        result = await execute(subject, reclaim(subject, []))
        assert (result.outcome, result.applied, result.gone) == (DirectiveOutcome.APPLIED, 0, b"")

    async def test_reclaimed_chunks_can_be_stored_again(self, subject: CacheSubject) -> None:
        trunk = await subject.store(2)
        await execute(subject, reclaim(subject, trunk.keys))
        again = await subject.store(2, after=trunk)
        assert again.keys == trunk.keys
        assert all(await tiers(subject, trunk.keys))

    async def test_demote_keeps_the_lower_copy(self, subject: CacheSubject) -> None:
        chain = await subject.store(3)
        result = await execute(subject, demote(subject, chain.keys[1:]))
        where = await tiers(subject, chain.keys)
        if subject.has_lower_tier:
            assert (result.outcome, result.applied) == (DirectiveOutcome.APPLIED, 2)
            assert where[1:] == [frozenset({Tier.L2})] * 2
        else:
            assert (result.applied, result.skipped) == (0, 2)
        assert all(where)
        assert result.gone == b""

    async def test_demote_leaves_what_came_back_to_life(self, subject: CacheSubject) -> None:
        chain = await subject.store(2)
        before = await tiers(subject, chain.keys)
        result = await execute(subject, demote(subject, chain.keys), dead=set())
        assert (result.applied, result.skipped) == (0, 2)
        assert await tiers(subject, chain.keys) == before

    async def test_a_pinned_chunk_is_not_reclaimed(self, subject: CacheSubject) -> None:
        if "pin" not in subject.control.capabilities.supported:
            pytest.skip("this cache cannot pin")
        chain = await subject.store(3)
        held = b"".join(chain.keys[:2])
        pin = Pin(
            directive_id="p",
            namespace=subject.namespace,
            reason="test",
            keys=held,
            pin_id="pin-1",
            lease_until_ns=1 << 62,
        )
        assert (await execute(subject, pin, tokens=chain.token_ids)).outcome is DirectiveOutcome.APPLIED
        assert (await execute(subject, pin, tokens=chain.token_ids)).outcome is DirectiveOutcome.APPLIED
        result = await execute(subject, reclaim(subject, chain.keys))
        assert (result.applied, result.skipped, result.gone) == (1, 2, chain.keys[2])
        unpin = Unpin(directive_id="u", namespace=subject.namespace, reason="test", keys=held, pin_id="pin-1")
        assert (await execute(subject, unpin)).outcome is DirectiveOutcome.APPLIED
        assert (await execute(subject, unpin)).outcome is DirectiveOutcome.APPLIED
        result = await execute(subject, reclaim(subject, chain.keys))
        assert (result.applied, result.skipped) == (3, 0)

    async def test_a_pin_that_moved_is_not_let_go_with_its_old_chain(self, subject: CacheSubject) -> None:
        if "pin" not in subject.control.capabilities.supported:
            pytest.skip("this cache cannot pin")
        trunk = await subject.store(1)
        left, right = [await subject.store(2, after=trunk) for _ in range(2)]
        for chain in (left, right):
            pin = Pin(
                directive_id="p",
                namespace=subject.namespace,
                reason="test",
                keys=b"".join(chain.keys),
                pin_id="moving",
                lease_until_ns=1 << 62,
            )
            await execute(subject, pin, tokens=chain.token_ids)
        old = Unpin(
            directive_id="u",
            namespace=subject.namespace,
            reason="test",
            keys=b"".join(left.keys),
            pin_id="moving",
        )
        assert (await execute(subject, old)).outcome is DirectiveOutcome.APPLIED
        result = await execute(subject, reclaim(subject, [*trunk.keys, left.keys[1], right.keys[1]]))
        assert (result.applied, result.skipped, result.gone) == (1, 2, left.keys[1])
        assert await subject.control.release_all() == 1

    async def test_release_all_gives_back_every_hold(self, subject: CacheSubject) -> None:
        if "pin" not in subject.control.capabilities.supported:
            pytest.skip("this cache cannot pin")
        chain = await subject.store(2)
        for name, end in (("one", 1), ("two", 2)):
            pin = Pin(
                directive_id="p",
                namespace=subject.namespace,
                reason="test",
                keys=b"".join(chain.keys[:end]),
                pin_id=name,
                lease_until_ns=1 << 62,
            )
            await execute(subject, pin, tokens=chain.token_ids)
        assert await subject.control.release_all() == 2
        assert await subject.control.release_all() == 0
        assert (await execute(subject, reclaim(subject, chain.keys))).applied == 2


class TestNoCacheControl:
    """The driver for "no control" claims nothing and does nothing."""

    @pytest.fixture
    async def control(self) -> AsyncIterator[NoCacheControl]:
        control = NoCacheControl("no coordinator configured")
        yield control
        await control.close()

    async def test_it_never_passes_its_self_test(self, control: NoCacheControl) -> None:
        test = await control.self_test()
        assert not test.ok
        assert test.problems == ("no coordinator configured",)

    async def test_every_directive_is_unsupported_with_the_reason(self, control: NoCacheControl) -> None:
        for directive in DIRECTIVES:
            result = await control.execute(directive, always, lambda: None)
            assert result.outcome is DirectiveOutcome.UNSUPPORTED
            assert result.reason == "no coordinator configured"

    async def test_it_finds_and_holds_nothing(self, control: NoCacheControl) -> None:
        found = await control.locate(NAMESPACE, [b"a" * 32, b"b" * 32])
        assert [(each.key, each.tiers) for each in found] == [
            (b"a" * 32, frozenset()),
            (b"b" * 32, frozenset()),
        ]
        assert await control.release_all() == 0
