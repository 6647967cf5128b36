"""Directives: what we ask of the cache. Each is idempotent and can be recomputed from state."""

from typing import TypeAlias

import msgspec

from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import DirectiveOutcome, Tier


class _Directive(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    directive_id: str
    namespace: Namespace
    reason: str


class Admit(_Directive, frozen=True, kw_only=True, tag="admit"):
    """Nothing of this call past token `bypass_from_token` may enter the reusable store."""

    call_id: str
    bypass_from_token: int


class Reclaim(_Directive, frozen=True, kw_only=True, tag="reclaim"):
    """Free these dead chunks in every tier we can reach. `keys` is a run of concatenated chunk keys.

    `owners` are the contexts that let go last: uid and number of chunks, in the order of the keys.
    """

    keys: bytes
    owners: tuple[tuple[str, int], ...] = ()


class Demote(_Directive, frozen=True, kw_only=True, tag="demote"):
    """Dead as far as we know, but not ours alone: leave the upper tier, keep the lower copy.

    `owners` as in `Reclaim`.
    """

    keys: bytes
    owners: tuple[tuple[str, int], ...] = ()


class Pin(_Directive, frozen=True, kw_only=True, tag="pin"):
    """Hold a chain until the lease ends. `keys` is the whole chain [0, end)."""

    pin_id: str
    keys: bytes
    lease_until_ns: int


class Unpin(_Directive, frozen=True, kw_only=True, tag="unpin"):
    """Release what `Pin` with the same `pin_id` held."""

    pin_id: str
    keys: bytes


Directive: TypeAlias = Admit | Reclaim | Demote | Pin | Unpin

OWNERS_ALONE = (Reclaim, Demote, Pin, Unpin)
"""What of several proxies on one log only the owner may ask for. An `Admit` rides on a call."""


class DirectiveResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a directive: the cache's own word, never our hope.

    `applied` and `skipped` count chunks; `gone` is the run of keys that a lookup no longer shows;
    `skipped` chunks are there still (pinned by others, in use, or unreachable).
    """

    outcome: DirectiveOutcome
    reason: str = ""
    applied: int = 0
    skipped: int = 0
    gone: bytes = b""
    tiers: tuple[Tier, ...] = ()
