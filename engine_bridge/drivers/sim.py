"""The embedded engine's cache, steered as a stock LMCache is: by key, and believed only when looked up.

Same reach as level 1: reclaim and demote by key in L1 and L2, holds in L2, the bypass hint on the call.
Nothing is ordered or held in L1, and HBM is not touched. Unlike LMCache's pins these end with the process.
"""

import secrets
from array import array
from collections.abc import Callable, Sequence
from contextlib import aclosing

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.drivers.lmcache_reclaim import Progress
from engine_bridge.sim.clock import NANOSECONDS
from engine_bridge.sim.requests import SimRequest
from engine_bridge.sim.runner import EngineRunner
from lifecycle.core.directives import Admit, Demote, Directive, DirectiveResult, Pin, Reclaim, Unpin
from lifecycle.core.ids import KEY_BYTES, Namespace, split_keys
from lifecycle.ports import CacheCapabilities, Presence, SelfTest
from lifecycle.vocabulary import DirectiveOutcome, Tier

NAME = "sim"
ATTEMPTS = 12
PROBE_CHUNKS = 3
BOTH = frozenset({Tier.L1, Tier.L2})

NO_L2 = "the embedded engine has no L2, where a pin would hold"
PINS_OFF = "L2 pins are switched off: set l2_pins to hold chains in L2"

StillDead = Callable[[bytes], bool]


class SimCache:
    """`CacheControl` over an engine in this process. Nothing is deleted before `self_test` was ok.

    `settle_seconds` is the wait between two looks, in the engine's time; 0 takes twice the time after which
    the copy of a stored chunk to L2 begins.
    """

    def __init__(
        self,
        runner: EngineRunner,
        model_name: str,
        *,
        l2_pins: bool = False,
        settle_seconds: float = 0.0,
        attempts: int = ATTEMPTS,
    ) -> None:
        config = runner.engine.config
        self._runner = runner
        self._model_name = model_name
        self._attempts = attempts
        self._settle_ns = int(settle_seconds * NANOSECONDS) or 2 * config.write_back_delay_ns
        self._no_pins = NO_L2 if not config.l2_bytes else "" if l2_pins else PINS_OFF
        self._held: dict[str, tuple[str, bytes]] = {}
        self._is_trusted = False

    @property
    def capabilities(self) -> CacheCapabilities:
        supported = {"admit", "reclaim", "demote"}
        unsupported = dict.fromkeys(("pin", "unpin"), self._no_pins) if self._no_pins else {}
        return CacheCapabilities(
            driver=NAME,
            level=1,
            supported=frozenset(supported | ({"pin", "unpin"} - unsupported.keys())),
            unsupported=unsupported,
        )

    async def self_test(self) -> SelfTest:
        """Compute a prompt of random tokens and find its chunks under the keys that we compute."""
        config = self._runner.engine.config
        size = config.chunk_tokens
        tokens = array("I", (secrets.randbelow(1 << 32) for _ in range(PROBE_CHUNKS * size)))
        request = SimRequest(
            request_id=f"self-test-{secrets.token_hex(8)}", token_ids=tokens, output_ids=array("I", [0])
        )
        async with aclosing(self._runner.generate(request)) as outputs:
            async for _ in outputs:
                pass
        keys = split_keys(chunk_keys(tokens, size))
        for _ in range(self._attempts):
            self._is_trusted = all(self._runner.locate("", keys))
            if self._is_trusted:
                break
            await self._settle()
        self._runner.delete("", keys, BOTH)
        problem = "the embedded engine does not show the keys that we compute: this is a fault of kvtether"
        return SelfTest(
            ok=self._is_trusted,
            problems=() if self._is_trusted else (problem,),
            chunk_size=size,
            bytes_per_token=config.hardware.bytes_per_token,
        )

    async def locate(self, namespace: Namespace, keys: Sequence[bytes]) -> Sequence[Presence]:
        """Which of L1 and L2 hold each key; a model that is not served has nothing."""
        if namespace.model != self._model_name:
            return [Presence(key, frozenset()) for key in keys]
        found = self._runner.locate(namespace.salt, keys)
        return [Presence(key, tiers) for key, tiers in zip(keys, found, strict=True)]

    async def execute(
        self,
        directive: Directive,
        still_dead: StillDead,
        token_ids: Callable[[], Sequence[int] | None],
    ) -> DirectiveResult:
        """Carry out one directive; concurrent calls are fine. Takes some settle times for a reclaim.

        `applied` of a reclaim counts chunks that two looks in a row do not show, whoever removed them.
        """
        reason = self.capabilities.unsupported.get(type(directive).__name__.lower())
        if reason is not None:
            return DirectiveResult(outcome=DirectiveOutcome.UNSUPPORTED, reason=reason)
        if directive.namespace.model != self._model_name:
            reason = f"the embedded engine serves {self._model_name!r}, not {directive.namespace.model!r}"
            return DirectiveResult(outcome=DirectiveOutcome.REJECTED, reason=reason)
        salt = directive.namespace.salt
        match directive:
            case Admit():
                return DirectiveResult(
                    outcome=DirectiveOutcome.ACCEPTED, reason="rides on the call as a body hint"
                )
            case Reclaim() | Demote() if not self._is_trusted:
                return DirectiveResult(
                    outcome=DirectiveOutcome.REJECTED, reason="the self-test has not passed"
                )
            case Reclaim():
                return await self._reclaim(salt, split_keys(directive.keys), still_dead)
            case Demote():
                return await self._demote(salt, split_keys(directive.keys), still_dead)
            case Pin():
                return self._pin(salt, directive)
            case Unpin():
                released = self._release(directive.pin_id, directive.keys)
                return DirectiveResult(outcome=DirectiveOutcome.APPLIED, applied=released, tiers=(Tier.L2,))

    async def release_all(self) -> int:
        """Let go of everything held; answers how many pins that were."""
        held = list(self._held)
        for pin_id in held:
            self._release(pin_id)
        return len(held)

    async def close(self) -> None:
        """The engine belongs to whoever started it."""

    async def _reclaim(self, salt: str, keys: Sequence[bytes], still_dead: StillDead) -> DirectiveResult:
        progress = Progress(keys)
        for attempt in range(self._attempts):
            if attempt:
                await self._settle()
            pending = progress.pending()
            progress.leave_alone([key for key in pending if not still_dead(key)], "alive again")
            deleted = self._runner.delete(salt, progress.pending(), BOTH)
            progress.leave_alone(deleted.pinned, "pinned")
            pending = progress.pending()
            for key, tiers in zip(pending, self._runner.locate(salt, pending), strict=True):
                progress.look(key, clean=not tiers and key not in deleted.in_use)
            if not progress.pending():
                break
        return progress.result((Tier.L1, Tier.L2), "copies are in use", removed=True)

    async def _demote(self, salt: str, keys: Sequence[bytes], still_dead: StillDead) -> DirectiveResult:
        """Chunks that lie in L2 and not in L1 count as applied, whoever moved them."""
        progress = Progress(keys)
        for attempt in range(self._attempts):
            if attempt:
                await self._settle()
            pending = progress.pending()
            covered: list[bytes] = []
            for key, tiers in zip(pending, self._runner.locate(salt, pending), strict=True):
                progress.look(key, clean=tiers == {Tier.L2})
                if not tiers:
                    progress.leave_alone([key], "not in the cache")
                elif tiers == {Tier.L1} and attempt:
                    # In the first round its copy in L2 may yet be in the making.
                    progress.leave_alone([key], "only in L1")
                elif tiers == BOTH:
                    covered.append(key)
            progress.leave_alone([key for key in covered if not still_dead(key)], "alive again")
            pending = progress.pending()
            self._runner.delete(salt, [key for key in covered if key in pending], frozenset({Tier.L1}))
            if not pending:
                break
        return progress.result((Tier.L1,), "L1 copies are in use", removed=False)

    def _pin(self, salt: str, directive: Pin) -> DirectiveResult:
        known = self._held.get(directive.pin_id)
        if known != (salt, directive.keys):
            # The new chain first, so that what both have in common is held throughout.
            self._runner.pin(salt, split_keys(directive.keys))
            self._release(directive.pin_id)
            self._held[directive.pin_id] = (salt, directive.keys)
        return DirectiveResult(
            outcome=DirectiveOutcome.APPLIED,
            reason="held against L2 eviction; L1 is not held",
            applied=len(directive.keys) // KEY_BYTES,
            tiers=(Tier.L2,),
        )

    def _release(self, pin_id: str, keys: bytes = b"") -> int:
        """Let go of a pin; answers its chunks, 0 if it is not held.

        With `keys` only if it still holds that chain: one that moved let the old chain go when it did.
        """
        salt, held = self._held.get(pin_id, ("", b""))
        if not held or (keys and keys != held):
            return 0
        del self._held[pin_id]
        self._runner.unpin(salt, split_keys(held))
        return len(held) // KEY_BYTES

    async def _settle(self) -> None:
        clock = self._runner.clock
        await clock.sleep_until(clock.now_ns() + self._settle_ns)
