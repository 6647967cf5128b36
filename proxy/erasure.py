"""Erasing a tenant: every key that only it refers to is freed and confirmed absent, key by key."""

import msgspec

from lifecycle.core.directives import Reclaim
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.core.observations import CloseRequested, Observation, PinsDropped
from lifecycle.core.plan import MAX_KEYS
from lifecycle.core.state import ContextState
from lifecycle.errors import LogUnavailable
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import DirectiveOutcome
from proxy.forgetting import ERASED
from proxy.runtime import Runtime

IN_FLIGHT = "calls of the tenant are in flight: erase again when they are over"


class Erasure(msgspec.Struct, kw_only=True):
    """What became of a tenant's chunks, by key in hex.

    `erased` are absent from the cache, by its own word. `shared` are those that another tenant refers to
    as well. `left` could not be freed; `reasons` say why, and what else is not done yet.
    """

    tenant: str
    contexts: int = 0
    erased: list[str] = []
    shared: list[str] = []
    left: list[str] = []
    reasons: list[str] = []


async def erase_tenant(runtime: Runtime, tenant: str) -> Erasure:
    """Close the tenant's contexts, drop its pins, and free what only it referred to. Its conversations are
    forgotten here, and by each other proxy of the log that hears of a context closed by it.

    Chunks that another tenant's context refers to stay and are listed. Erasing is asked for by a person, so
    it is carried out in every mode; a failed self-test still stops it. What the tenant's calls in flight
    refer to is left, for the engine goes on storing it. Raises `LogUnavailable`.
    """
    runtime.tracking.calls.forget_tenant(tenant)
    contexts = runtime.tracker.contexts
    states = list(contexts.of_tenant(tenant))
    uids = {state.uid for state in states}
    owned: dict[Namespace, dict[bytes, None]] = {}
    for state in states:
        for version in state.versions.values():
            owned.setdefault(state.namespace.cache, {}).update(dict.fromkeys(split_keys(version.keys)))
    for namespace in contexts.index.namespaces():
        dead = contexts.index.dead_keys(namespace, uids.__contains__)
        owned.setdefault(namespace, {}).update(dict.fromkeys(dead))
    result = Erasure(tenant=tenant, contexts=len(states))
    for state in states:
        await _close(runtime, state)
    await runtime.pins.settled()
    for namespace, keys in owned.items():
        await _erase(runtime, namespace, list(keys), result)
    if any(state.flights for state in contexts.of_tenant(tenant)):
        result.reasons.append(IN_FLIGHT)
    return result


async def _close(runtime: Runtime, state: ContextState) -> None:
    now_ns = runtime.clock.now_ns()
    await observe_now(runtime.tracker, state.uid, CloseRequested(at_ns=now_ns, reason=ERASED))
    await observe_now(runtime.tracker, state.uid, PinsDropped(at_ns=now_ns, reason=ERASED))


async def observe_now(tracker: Tracker, uid: str, observation: Observation) -> None:
    """Observe for somebody who is told that it is done. Raises `LogUnavailable` if it only waits."""
    recorded = await tracker.observe(uid, observation)
    if not recorded and tracker.degraded:
        raise LogUnavailable(tracker.degraded)


async def _erase(runtime: Runtime, namespace: Namespace, keys: list[bytes], result: Erasure) -> None:
    index = runtime.tracker.contexts.index
    alive = [k for k in keys if index.references(namespace, k)]
    if alive:
        others = _keys_of_others(runtime, namespace, result.tenant)
        result.shared += [k.hex() for k in alive if k in others]
        result.left += [k.hex() for k in alive if k not in others]
    dead = [k for k in keys if not index.references(namespace, k)]
    objection = runtime.objection(namespace)
    if objection and dead:
        result.left += [k.hex() for k in dead]
        result.reasons.append(objection)
        return
    for start in range(0, len(dead), MAX_KEYS):
        batch = dead[start : start + MAX_KEYS]
        directive = Reclaim(
            directive_id=runtime.ids.new("d"),
            namespace=namespace,
            reason=f"tenant {result.tenant} is erased",
            keys=b"".join(batch),
        )
        await runtime.reclaimer.propose(directive)
        outcome = await runtime.reclaimer.execute(directive)
        gone = set(split_keys(outcome.gone))
        result.erased += [k.hex() for k in batch if k in gone]
        result.left += [k.hex() for k in batch if k not in gone]
        if outcome.outcome is not DirectiveOutcome.APPLIED or outcome.skipped:
            result.reasons.append(outcome.reason)


def _keys_of_others(runtime: Runtime, namespace: Namespace, tenant: str) -> set[bytes]:
    """Every key in a namespace that contexts of other tenants refer to."""
    states = runtime.tracker.contexts.states.values()
    others = (s for s in states if s.key.tenant != tenant and s.namespace.cache == namespace)
    return {key for s in others for version in s.versions.values() for key in split_keys(version.keys)}
