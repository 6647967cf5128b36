"""What is true, in plain JSON: ids, roles, states, ranges and chunk keys. Never text, never token ids."""

from collections.abc import Mapping
from typing import Any

import msgspec

from lifecycle.core.events import RecordedEvent
from lifecycle.core.ids import Namespace, split_keys
from lifecycle.core.leases import lease_end_ns
from lifecycle.core.state import (
    Branch,
    ContextState,
    Divergence,
    Flight,
    PinHold,
    PrefixLint,
    Version,
    version_states,
)
from lifecycle.projections.chunk_index import ChunkIndex
from lifecycle.projections.contexts import DirectiveRecord


def context_summary(state: ContextState) -> dict[str, Any]:
    """One line of a list of contexts."""
    return {
        "uid": state.uid,
        "tenant": state.key.tenant,
        "context_id": state.key.context_id,
        "model": state.namespace.model,
        "state": "closed" if state.closed else "in_call" if state.flights else "waiting",
        "closed": state.closed,
        "unmapped": state.unmapped,
        "gap": state.gap,
        "one_off": state.one_off,
        "agent": state.agent,
        "flow": state.flow,
        "backend": state.backend,
        "wait": state.wait,
        "messages": sum(v.index >= 0 for v in state.versions.values()),
        "tokens": max((v.end for v in state.versions.values()), default=0),
        "pins": len(state.pins),
        "active_ns": state.active_ns,
    }


def context_view(state: ContextState, index: ChunkIndex) -> dict[str, Any]:
    """Everything about one context: versions with state, range and chunks, branches, calls, pins."""
    states = version_states(state)
    return {
        **context_summary(state),
        "parent_uid": state.parent_uid,
        "forked": state.forked,
        "identity": state.rung,
        "namespace": _namespace(state.namespace),
        "chunk_size": state.chunk_size,
        "lease_end_ns": lease_end_ns(state) if state.open else None,
        "versions": [
            _version(state.namespace, v, str(states.get(v.id, "expired")), index)
            for v in sorted(state.versions.values(), key=lambda v: v.id)
        ],
        "branches": [_branch(b) for b in state.branches],
        "calls": [call_view(f) for f in state.flights],
        "pins_held": [_pin(p) for p in state.pins],
        "operations": {
            name: {"applied": s.applied, "held": sorted(s.held)} for name, s in sorted(state.sources.items())
        },
        "lint": lint_view(state.lint),
        "outcomes": [{"start": a, "end": b, "result": r} for a, b, r in state.outcomes],
    }


def lint_view(lint: PrefixLint) -> dict[str, Any]:
    """Where its prompts left the one before, the latest last, and what that cost; null is unknown."""
    return {
        "count": lint.count,
        "lost_tokens": lint.lost_tokens,
        "declared": {"count": lint.declared, "lost_tokens": lint.declared_lost_tokens},
        "beside": {"count": lint.beside, "lost_tokens": lint.beside_lost_tokens},
        "last": [_divergence(each) for each in lint.last],
    }


def call_view(flight: Flight) -> dict[str, Any]:
    """A call in flight."""
    return {
        "call_id": flight.call_id,
        "attempt": flight.attempt,
        "prefilled": flight.prefilled,
        "mapped": flight.mapping_known,
        "concurrent": flight.concurrent,
        "arrived_ns": flight.arrived_ns,
    }


def event_view(recorded: RecordedEvent) -> dict[str, Any]:
    """One event as the log holds it; bytes in hex."""
    document = msgspec.to_builtins(recorded.event, builtin_types=(bytes,))
    return {
        "position": recorded.position,
        "stream": recorded.stream,
        "version": recorded.version,
        "event": _hexed(document),
    }


def directive_view(record: DirectiveRecord) -> dict[str, Any]:
    """A directive, why, as of when, and what became of it."""
    outcome = record.result.outcome if record.result is not None else "proposed"
    return {
        **_hexed(msgspec.to_builtins(record.directive, builtin_types=(bytes,))),
        "as_of": record.as_of,
        "proposed_ns": record.proposed_ns,
        "outcome": outcome,
        "result": _hexed(msgspec.to_builtins(record.result, builtin_types=(bytes,))),
        "settled_ns": record.settled_ns,
    }


def namespace_views(index: ChunkIndex) -> list[dict[str, Any]]:
    """Counts of each KV namespace's books."""
    return [
        {
            **_namespace(n),
            **msgspec.to_builtins(index.stats(n)),
            "last_untracked_ns": index.last_untracked_ns(n),
        }
        for n in index.namespaces()
    ]


def _version(namespace: Namespace, version: Version, state: str, index: ChunkIndex) -> dict[str, Any]:
    chunks = []
    for key in split_keys(version.keys):
        described = index.describe(namespace, key)
        chunks.append(
            {
                "key": key.hex(),
                "references": described.references if described else 0,
                "flags": list(described.flags) if described else [],
            }
        )
    return {
        "id": version.id,
        "parent": version.parent,
        "index": version.index,
        "role": version.role,
        "state": state,
        "tokens": [version.start, version.end] if version.mapped else None,
        "chunks": chunks,
    }


def _divergence(found: Divergence) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(found)
    for name in ("shared_tokens", "lost_tokens"):
        document[name] = document[name] if document[name] >= 0 else None
    return document


def _branch(branch: Branch) -> dict[str, Any]:
    return {
        "id": branch.id,
        "tip": branch.tip,
        "generated": list(branch.tails),
        "doubted_ns": branch.doubted_ns or None,
        "wait": branch.wait,
        "tool": branch.tool,
        "since_ns": branch.since_ns,
    }


def _pin(pin: PinHold) -> dict[str, Any]:
    return {
        "pin_id": pin.pin_id,
        "index": pin.index,
        "tip": pin.tip,
        "until_ns": pin.until_ns,
        "size_bytes": pin.size_bytes,
        "moving": pin.moving,
    }


def _namespace(namespace: Namespace) -> dict[str, Any]:
    return {"model": namespace.model, "salt": namespace.salt, "fingerprint": namespace.fingerprint}


def _hexed(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: _hexed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hexed(item) for item in value]
    return value
