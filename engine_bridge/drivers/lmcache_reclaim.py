"""Reclaim and demote on LMCache servers: delete objects by key, and believe only what a lookup then shows.

Why it takes rounds: the directory lags the servers by their flush interval; copies from L1 to L2 are made
later, and one that is under way read-locks its L1 object, so an unforced delete is refused. A delete that
no server refused therefore proves that no copy of that object is in the making, and two clean looks a settle
time apart prove that none was reported late. What the directory does not show may still lie in L2, for a
coordinator that started anew has heard of nothing: so L2 is asked to delete that, too, once.

A server that is away keeps nobody else's copies from being deleted. But as long as the coordinator counts it
among its servers nothing is proven gone, for it may hold what it did not report. When the coordinator gave it
up its L1 counts as lost; copies in an L2 of its own are owed until it is back, those that it never reported
too.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from engine_bridge.drivers.lmcache_client import Found, Instance, LmcacheClient, Placement
from engine_bridge.drivers.lmcache_keys import MAX_KEYS_PER_REQUEST, Layout, ObjectKey, batched, expand
from engine_bridge.drivers.lmcache_owed import OwedDeletes, StillDead
from engine_bridge.errors import CacheUnavailable
from lifecycle.core.directives import DirectiveResult
from lifecycle.vocabulary import DirectiveOutcome, Tier

LOOKS_NEEDED = 2
RETRY_OBJECTS = 256
"""A refusal does not say which object was locked, so later rounds send fewer objects at a time."""


class Round:
    """The servers of one pass. `away` are those that did not answer, by id, with what was heard of them."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self.instances = {each.instance_id: each for each in instances}
        self.away: dict[str, str] = {}

    def present(self) -> list[Instance]:
        """Those that answered so far, or were not asked yet."""
        return [each for each in self.instances.values() if each.instance_id not in self.away]


class Target:
    """Where a directive's chunks live: one model and salt, with the layout of its chunks."""

    def __init__(self, model_name: str, salt: str, layout: Layout) -> None:
        self.model_name = model_name
        self.salt = salt
        self.layout = layout

    def objects(self, keys: Iterable[bytes]) -> list[ObjectKey]:
        return expand(keys, self.model_name, self.salt, self.layout)


class Progress:
    """What is known of each chunk of a directive: still to do, left alone and why, or done.

    A chunk is done after `LOOKS_NEEDED` clean looks in a row. A look that is not clean starts over.
    """

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._looks = dict.fromkeys(keys, 0)
        self._left_alone: dict[bytes, str] = {}

    def pending(self) -> list[bytes]:
        """Chunks to work on, in the order given."""
        return [
            key for key, looks in self._looks.items() if looks < LOOKS_NEEDED and key not in self._left_alone
        ]

    def done(self) -> list[bytes]:
        return [key for key, looks in self._looks.items() if looks >= LOOKS_NEEDED]

    def leave_alone(self, keys: Iterable[bytes], why: str) -> None:
        for key in keys:
            self._left_alone[key] = why

    def look(self, key: bytes, clean: bool) -> None:
        self._looks[key] = self._looks[key] + 1 if clean else 0

    def result(self, tiers: tuple[Tier, ...], trouble: str, removed: bool) -> DirectiveResult:
        """`trouble` explains what is still pending; `removed` says that done means gone everywhere."""
        done, pending = self.done(), self.pending()
        counts = Counter(self._left_alone.values())
        said = [f"{count} {why}" for why, count in sorted(counts.items())]
        if pending:
            said.append(f"{len(pending)} of {len(self._looks)} not confirmed: {trouble}")
        return DirectiveResult(
            outcome=DirectiveOutcome.FAILED if pending else DirectiveOutcome.APPLIED,
            reason="; ".join(said),
            applied=len(done),
            skipped=len(self._left_alone) + len(pending),
            gone=b"".join(done) if removed else b"",
            tiers=tiers,
        )


def by_chunk(found: Iterable[Found]) -> dict[bytes, list[Found]]:
    """Lookup results gathered by chunk key; a chunk has one entry an object."""
    chunks: dict[bytes, list[Found]] = {}
    for each in found:
        chunks.setdefault(each.key.chunk_key, []).append(each)
    return chunks


def tiers_of(objects: Iterable[Found]) -> frozenset[Tier]:
    """Tiers in which at least one copy of at least one object lies."""
    return frozenset(Tier(placement.tier) for each in objects for placement in each.placements)


def is_covered(objects: Iterable[Found]) -> bool:
    """True if every object that has an L1 copy has an L2 copy too: L1 can go and nothing is lost."""
    return all(
        {Tier.L1, Tier.L2} <= tiers or Tier.L1 not in tiers
        for tiers in (tiers_of([each]) for each in objects)
    )


def reachable_from(placement: Placement, instances: Mapping[str, Instance]) -> Instance | None:
    """A server that can delete this copy: the one that reported it, or any if the pool is shared."""
    if placement.instance_id in instances:
        return instances[placement.instance_id]
    return next(iter(instances.values()), None) if placement.shared else None


class ChunkRemover:
    """Removes chunks from the fleet. `settle_seconds` must exceed the servers' event flush interval."""

    def __init__(self, client: LmcacheClient, settle_seconds: float, attempts: int) -> None:
        self._client = client
        self.settle_seconds = settle_seconds
        self._attempts = attempts
        self._owed = OwedDeletes(client)
        self._registered: tuple[str, ...] = ()

    async def reclaim(self, keys: Sequence[bytes], target: Target, still_dead: StillDead) -> DirectiveResult:
        """Remove every copy of every chunk that is still dead and that nobody pinned. Never raises."""
        progress = Progress(keys)
        trouble = ""
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(self.settle_seconds)
            try:
                trouble = await self._reclaim_round(progress, target, still_dead, first=attempt == 0)
            except CacheUnavailable as error:
                trouble = str(error)
            if not progress.pending():
                break
        self._owed.made(target.objects(progress.done()), self._registered, still_dead)
        return progress.result((Tier.L1, Tier.L2), trouble, removed=True)

    async def collect_owed(self) -> None:
        """Have servers that are back delete what they missed while they were away. Raises
        `CacheUnavailable` where the coordinator does not say who is there."""
        if self._owed:
            await self._owed.collect(await self._client.instances())

    async def _reclaim_round(
        self, progress: Progress, target: Target, still_dead: StillDead, first: bool
    ) -> str:
        """One pass over what is pending; answers why something may be left."""
        pins = await self._client.pins(target.model_name, target.salt)
        pinned = {key.chunk_key for key in pins}
        progress.leave_alone((key for key in progress.pending() if key in pinned), "pinned")
        servers = Round(await self._client.instances())
        if not servers.instances:
            raise CacheUnavailable("no cache server is registered with the coordinator")
        self._registered = tuple(each.url for each in servers.instances.values())
        await self._owed.collect(servers.present())
        locked: set[bytes] = set()
        for instance in servers.present():
            with self._borne(servers, instance):
                locked |= await self._delete_l1(progress, target, still_dead, instance, first)
        pending = progress.pending()
        chunks = by_chunk(await self._client.lookup(target.objects(pending)))
        for instance in servers.present() if first else ():
            with self._borne(servers, instance):
                await self._delete_unseen(progress, chunks, target, still_dead, instance)
        unreachable = await self._delete_l2(progress, chunks, still_dead, servers)
        for key in progress.pending():
            progress.look(key, clean=key not in locked and not servers.away and not tiers_of(chunks[key]))
        if servers.away:
            return "; ".join(f"{name} is away: {why}" for name, why in sorted(servers.away.items()))
        if unreachable:
            return f"copies on {', '.join(sorted(unreachable))} cannot be reached"
        return "copies are in use" if locked else "copies keep showing up"

    @contextmanager
    def _borne(self, servers: Round, instance: Instance) -> Iterator[None]:
        """What one server cannot do is written down and keeps nobody from the next."""
        try:
            yield
        except CacheUnavailable as error:
            servers.away[instance.instance_id] = str(error)

    async def _delete_l1(
        self,
        progress: Progress,
        target: Target,
        still_dead: StillDead,
        instance: Instance,
        first: bool,
    ) -> set[bytes]:
        """Delete from one server. All are asked, also those the directory does not name: it may not have
        heard yet.

        Answers the chunks of batches in which something was refused.
        """
        per_chunk = target.layout.objects_per_chunk()
        size = max(1, (MAX_KEYS_PER_REQUEST if first else RETRY_OBJECTS) // per_chunk)
        locked: set[bytes] = set()
        for batch in batched(progress.pending(), size):
            dead = self._dead(progress, batch, still_dead)
            if dead and (await self._client.delete(instance, target.objects(dead), Tier.L1)).skipped:
                locked.update(dead)
        return locked

    async def _delete_l2(
        self,
        progress: Progress,
        chunks: Mapping[bytes, Sequence[Found]],
        still_dead: StillDead,
        servers: Round,
    ) -> set[str]:
        """Delete the L2 copies the directory shows; answers the servers that are not there any more."""
        instances = {each.instance_id: each for each in servers.present()}
        plan: dict[tuple[str, str], list[ObjectKey]] = {}
        unreachable: set[str] = set()
        for key in progress.pending():
            for each in chunks[key]:
                for placement in each.placements:
                    if placement.tier != Tier.L2:
                        continue
                    instance = reachable_from(placement, instances)
                    if instance is None:
                        unreachable.add(placement.instance_id)
                    else:
                        plan.setdefault((instance.instance_id, placement.backend), []).append(each.key)
        for (instance_id, backend), objects in plan.items():
            with self._borne(servers, instances[instance_id]):
                for batch in batched(objects, MAX_KEYS_PER_REQUEST):
                    dead = set(self._dead(progress, [each.chunk_key for each in batch], still_dead))
                    chosen = [each for each in batch if each.chunk_key in dead]
                    if not chosen:
                        continue
                    reply = await self._client.delete(instances[instance_id], chosen, Tier.L2, backend)
                    if not reply.ok:
                        raise CacheUnavailable(f"{backend} on {instance_id}: {reply.error}")
        return unreachable

    async def _delete_unseen(
        self,
        progress: Progress,
        chunks: Mapping[bytes, Sequence[Found]],
        target: Target,
        still_dead: StillDead,
        instance: Instance,
    ) -> None:
        """Delete from a server's L2 what the directory shows in no tier; it need not be anywhere."""
        unseen = [key for key in progress.pending() if not tiers_of(chunks[key])]
        size = max(1, MAX_KEYS_PER_REQUEST // target.layout.objects_per_chunk())
        for adapter in await self._client.adapters(instance) if unseen else ():
            for batch in batched(unseen, size):
                dead = self._dead(progress, batch, still_dead)
                if dead:
                    await self._client.delete(instance, target.objects(dead), Tier.L2, adapter)

    def _dead(self, progress: Progress, keys: Iterable[bytes], still_dead: StillDead) -> list[bytes]:
        """The keys that may be deleted at this very moment, without repeats; the others are left alone."""
        dead: dict[bytes, None] = {}
        for key in keys:
            if still_dead(key):
                dead[key] = None
            else:
                progress.leave_alone([key], "alive again")
        return list(dead)

    async def demote(self, keys: Sequence[bytes], target: Target, still_dead: StillDead) -> DirectiveResult:
        """Remove L1 copies of chunks that lie complete in L2. Never raises.

        The answer counts chunks that are in L2 and not in L1 as applied, whoever moved them.
        """
        progress = Progress(keys)
        trouble = ""
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(self.settle_seconds)
            try:
                away = await self._demote_round(progress, target, still_dead, last_chance=attempt > 0)
                trouble = "; ".join(away.values()) or "L1 copies are in use or come back"
            except CacheUnavailable as error:
                trouble = str(error)
            if not progress.pending():
                break
        return progress.result((Tier.L1,), trouble, removed=False)

    async def _demote_round(
        self, progress: Progress, target: Target, still_dead: StillDead, last_chance: bool
    ) -> Mapping[str, str]:
        """One pass; answers who is away. A chunk whose L2 copy may yet be made gets one more round."""
        servers = Round(await self._client.instances())
        chunks = by_chunk(await self._client.lookup(target.objects(progress.pending())))
        plan: dict[str, list[ObjectKey]] = {}
        for key in progress.pending():
            tiers = tiers_of(chunks[key])
            progress.look(key, clean=tiers == {Tier.L2})
            if not tiers:
                progress.leave_alone([key], "not in the cache")
            elif not is_covered(chunks[key]):
                if last_chance:
                    progress.leave_alone([key], "only in L1")
            else:
                for each in chunks[key]:
                    for placement in each.placements:
                        if placement.tier == Tier.L1:
                            plan.setdefault(placement.instance_id, []).append(each.key)
        for instance_id, objects in plan.items():
            instance = servers.instances.get(instance_id)
            if instance is None:
                continue
            with self._borne(servers, instance):
                for batch in batched(objects, MAX_KEYS_PER_REQUEST):
                    dead = set(self._dead(progress, [each.chunk_key for each in batch], still_dead))
                    chosen = [each for each in batch if each.chunk_key in dead]
                    if chosen:
                        await self._client.delete(instance, chosen, Tier.L1)
        return servers.away
