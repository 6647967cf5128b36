"""Level 1: stock LMCache 0.5.6 in multi-process mode, steered over HTTP.

What it can do: reclaim and demote by key, tell whether the bypass hint works and, if switched on, hold chains
in L2. What it cannot: hold or order anything in L1, reach the engine's own prefix cache.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from engine_bridge.drivers.lmcache_client import HeardCall, LmcacheClient, tell_nobody
from engine_bridge.drivers.lmcache_keys import CannotExpand, Layout, layout_from_status
from engine_bridge.drivers.lmcache_pins import HeldPin, PinLedger, Reconciled
from engine_bridge.drivers.lmcache_reclaim import ChunkRemover, Target, by_chunk, tiers_of
from engine_bridge.drivers.lmcache_selftest import Findings, StartupTest, Tokenize
from engine_bridge.engine_address import EngineAddress
from engine_bridge.errors import CacheUnavailable
from lifecycle.core.directives import Admit, Demote, Directive, DirectiveResult, Pin, Reclaim, Unpin
from lifecycle.core.ids import KEY_BYTES, Namespace, split_keys
from lifecycle.ports import CacheCapabilities, Presence, SelfTest
from lifecycle.vocabulary import DirectiveOutcome, Tier

NAME = "lmcache_mp"
ATTEMPTS = 12
UNREACHED = -1
MIN_SETTLE_SECONDS = 0.5
FLUSHES_TO_SETTLE = 2
"""A store may be reported one flush interval late; the second one is for the coordinator's own queue."""

NO_PINS = "L2 pins outlive the proxy and are switched off: set l2_pins to hold chains in L2"
NOT_TESTED = "the self-test has not passed, so computed keys may name something else: run `kvtether doctor`"


class LmcacheMp:
    """`CacheControl` for engines and their cache fleet. Nothing is deleted before `self_test` was ok.

    `key_models` maps served model names to the name in cache keys where the engines' `/v1/models` does not
    tell; `settle_seconds` 0 derives the wait between two looks from the servers' event flush interval.
    `heard` is told of each control call.
    """

    def __init__(
        self,
        coordinator_url: str,
        engines: Sequence[EngineAddress],
        *,
        chunk_size: int = 0,
        l2_pins: bool = False,
        salts_adapters: bool = False,
        tokenize: Tokenize | None = None,
        key_models: Mapping[str, str] | None = None,
        settle_seconds: float = 0.0,
        attempts: int = ATTEMPTS,
        heard: HeardCall = tell_nobody,
    ) -> None:
        self._client = LmcacheClient(coordinator_url, heard, engines)
        self._engines = engines
        self._chunk_size = chunk_size
        self._l2_pins = l2_pins
        self._salts_adapters = salts_adapters
        self._tokenize = tokenize
        self._key_models = dict(key_models or {})
        self._settle_seconds = settle_seconds
        self._remover = ChunkRemover(self._client, settle_seconds or MIN_SETTLE_SECONDS, attempts)
        self._ledger = PinLedger(self._client)
        self._pin_lock = asyncio.Lock()
        self._findings = Findings()
        self._layouts: dict[str, Layout] = {}
        self._is_trusted = False

    @property
    def capabilities(self) -> CacheCapabilities:
        supported = {"reclaim", "demote"}
        unsupported: dict[str, str] = {}
        if self._findings.admission_problem:
            unsupported["admit"] = self._findings.admission_problem
        else:
            supported.add("admit")
        if self._l2_pins:
            supported |= {"pin", "unpin"}
        else:
            unsupported |= {"pin": NO_PINS, "unpin": NO_PINS}
        return CacheCapabilities(
            driver=NAME, level=1, supported=frozenset(supported), unsupported=unsupported
        )

    @property
    def findings(self) -> Findings:
        """What the last self-test learned."""
        return self._findings

    async def self_test(self) -> SelfTest:
        test = StartupTest(
            self._client,
            self._engines,
            chunk_size=self._chunk_size,
            tokenize=self._tokenize,
            salts_adapters=self._salts_adapters,
        )
        found = self._findings = await test.run()
        self._is_trusted = not found.problems
        self._remover.settle_seconds = self._settle_seconds or max(
            MIN_SETTLE_SECONDS, FLUSHES_TO_SETTLE * found.flush_seconds
        )
        return SelfTest(
            ok=self._is_trusted,
            problems=tuple(found.problems),
            chunk_size=found.chunk_size,
            bytes_per_token=found.bytes_per_token,
        )

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        """Which tiers hold each key, by the coordinator's directory.

        A tier counts if ANY copy of ANY object of the chunk (rank, group, server) lies there: that is what
        reclaim must know. A hit needs all of them. The directory lags by the servers' flush interval. Raises
        `CacheUnavailable`, also when the chunk's objects cannot be named.
        """
        name = self._key_model(namespace.model)
        try:
            layout = self._layouts.get(name) or await self._layout(name)
        except CannotExpand as error:
            raise CacheUnavailable(str(error)) from error
        target = Target(name, namespace.salt, layout)
        chunks = by_chunk(await self._client.lookup(target.objects(dict.fromkeys(keys))))
        return [Presence(key, tiers_of(chunks[key])) for key in keys]

    async def execute(
        self,
        directive: Directive,
        still_dead: Callable[[bytes], bool],
        token_ids: Callable[[], Sequence[int] | None],
    ) -> DirectiveResult:
        """Carry out one directive; concurrent calls are fine. Takes some settle times for a reclaim.

        `applied` of a reclaim counts chunks that no lookup shows any more, whoever removed them.
        """
        name = type(directive).__name__.lower()
        reason = self.capabilities.unsupported.get(name)
        if reason is not None:
            return DirectiveResult(outcome=DirectiveOutcome.UNSUPPORTED, reason=reason)
        try:
            match directive:
                case Admit():
                    return DirectiveResult(
                        outcome=DirectiveOutcome.ACCEPTED, reason="rides on the call as a body hint"
                    )
                case Reclaim() | Demote():
                    if not self._is_trusted:
                        return DirectiveResult(outcome=DirectiveOutcome.REJECTED, reason=NOT_TESTED)
                    target = await self._target(directive.namespace)
                    keys = split_keys(directive.keys)
                    if isinstance(directive, Reclaim):
                        return await self._remover.reclaim(keys, target, still_dead)
                    return await self._remover.demote(keys, target, still_dead)
                case Pin():
                    return await self._pin(directive, token_ids())
                case Unpin():
                    async with self._pin_lock:
                        released = await self._ledger.release(directive.pin_id, directive.keys)
                    return DirectiveResult(
                        outcome=DirectiveOutcome.APPLIED, applied=released, tiers=(Tier.L2,)
                    )
        except CannotExpand as error:
            return DirectiveResult(outcome=DirectiveOutcome.REJECTED, reason=str(error))
        except CacheUnavailable as error:
            return DirectiveResult(outcome=DirectiveOutcome.FAILED, reason=str(error))

    async def _pin(self, directive: Pin, token_ids: Sequence[int] | None) -> DirectiveResult:
        known = self._ledger.find(directive.pin_id)
        if token_ids is None and known is not None and known.keys == directive.keys:
            token_ids = known.tokens()
        if token_ids is None:
            return DirectiveResult(
                outcome=DirectiveOutcome.REJECTED,
                reason="this cache pins by token ids and those of the chain are not known any more",
            )
        if not self._is_trusted:
            return DirectiveResult(outcome=DirectiveOutcome.REJECTED, reason=NOT_TESTED)
        target = await self._target(directive.namespace)
        if len(target.layout.world_sizes) != 1:
            raise CannotExpand("engines with different parallel sizes serve this model: a pin names one size")
        count = len(directive.keys) // KEY_BYTES
        pin = HeldPin(
            pin_id=directive.pin_id,
            model_name=target.model_name,
            salt=target.salt,
            world_size=min(target.layout.world_sizes),
            keys=directive.keys,
            token_ids=array("I", token_ids[: count * self._findings.chunk_size]).tobytes(),
            lease_until_ns=directive.lease_until_ns,
        )
        async with self._pin_lock:
            await self._ledger.hold(pin)
        return DirectiveResult(
            outcome=DirectiveOutcome.APPLIED,
            reason="held against L2 eviction; L1 is not held",
            applied=count,
            tiers=(Tier.L2,),
        )

    def held_pins(self) -> tuple[HeldPin, ...]:
        """Our pins, for a caller that keeps them over a restart. They contain token ids, which are text."""
        return self._ledger.held()

    def adopt_pins(self, pins: Sequence[HeldPin]) -> None:
        """Take over pins of an earlier run, so that they can be reconciled and released."""
        self._ledger.adopt(pins)

    def before_pin(self, keep: Callable[[], Awaitable[None]]) -> None:
        """Have `keep` awaited before a pin is sent, when `held_pins` has it; if it raises, none is sent."""
        self._ledger.before_pin = keep

    async def incarnations(self) -> dict[str, int]:
        """A number per registered cache server that changes when the server starts anew, which voids its L1.

        It is the start time of the server's event log in nanoseconds, `UNREACHED` for one that does not
        answer. Raises `CacheUnavailable`.
        """
        found: dict[str, int] = {}
        for instance in await self._client.instances():
            try:
                log = (await self._client.status(instance)).get("kv_events") or {}
                found[instance.instance_id] = int(log.get("incarnation") or 0)
            except CacheUnavailable:
                found[instance.instance_id] = UNREACHED
        return found

    async def collect_owed(self) -> None:
        """Have cache servers that are back delete what they missed. Raises `CacheUnavailable`."""
        await self._remover.collect_owed()

    async def directory_began_ns(self) -> int:
        """When the coordinator started: its directory knows of no store before. 0 if it does not say."""
        return await self._client.coordinator_began_ns()

    async def reconcile(
        self, now_ns: int, is_wanted: Callable[[HeldPin], bool] = lambda pin: True
    ) -> Reconciled:
        """Compare our ledger with the coordinator's pins and repair. Raises `CacheUnavailable`."""
        async with self._pin_lock:
            return await self._ledger.reconcile(now_ns, is_wanted)

    async def release_all(self) -> int:
        """Release every pin of the ledger, adopted ones included. Raises `CacheUnavailable`."""
        async with self._pin_lock:
            return await self._ledger.release_all()

    async def close(self) -> None:
        """Close connections. Pins stay: they belong to their leases, not to this process."""
        await self._client.close()

    async def _target(self, namespace: Namespace) -> Target:
        name = self._key_model(namespace.model)
        return Target(name, namespace.salt, await self._layout(name))

    def _key_model(self, model: str) -> str:
        """Name of a served model in cache keys."""
        return self._key_models.get(model) or self._findings.key_models.get(model) or model

    async def _layout(self, model_name: str) -> Layout:
        """Objects of a chunk now: engines come and go, so a delete asks each time. Raises `CannotExpand`.

        A server that does not answer may still hold what was known of it: the objects are then the union.
        """
        statuses: list[Mapping[str, Any]] = []
        unreached: CacheUnavailable | None = None
        for instance in await self._client.instances():
            try:
                statuses.append(await self._client.status(instance))
            except CacheUnavailable as error:
                unreached = error
        known = self._layouts.get(model_name)
        if unreached is not None and known is None:
            raise unreached
        try:
            layout = layout_from_status(statuses, model_name)
        except CannotExpand:
            if unreached is None or known is None:
                raise
            return known
        if unreached is not None and known is not None:
            layout = layout.united(known)
        self._layouts[model_name] = layout
        return layout
