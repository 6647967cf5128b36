"""Which engine a call goes to, decided from who it is and how busy engines are. Pure.

A context stays with the engine that served it last: its KV lies there. A new one goes where rendezvous
hashing of its root puts it (Thaler and Ravishankar, 1998): every proxy, also after a restart, gives the same
answer, and an engine that comes or goes moves only the contexts that are its own. A fork shares its parent's
prefix and goes along, unless that engine is far busier than the others. What shares nothing goes where least
is to do.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b

import msgspec

OVERLOAD_FACTOR = 1.5
"""Times the mean load from which on an engine takes no forks from elsewhere (Mirrokni, Thorup and
Zadimoghaddam, 2018, bound loads by such a factor)."""

OVERLOAD_FLOOR = 8
"""Calls under way below which no engine counts as busy: a shared prefix is worth a short queue."""

STAYS = ""


class Placed(msgspec.Struct, frozen=True):
    """Where a call goes, and why; without a reason it stays where its context is."""

    backend: str
    reason: str = STAYS


class Kinship(msgspec.Struct, frozen=True, kw_only=True):
    """What of a context decides its place.

    `root` names the first of its ancestors that it shares a prefix with, itself without any. `held_by` is the
    engine that served it last, `parent_on` the one that holds what it forks from; empty if there is none.
    `alone` says that it shares nothing with what comes before or after it.
    """

    root: str
    held_by: str = ""
    parent_on: str = ""
    alone: bool = False


def ranked(root: str, names: Iterable[str]) -> list[str]:
    """The names in rendezvous order, the best first."""

    def weight(name: str) -> tuple[bytes, str]:
        told = f"{len(name)}:{name}{root}".encode("utf-8", "surrogatepass")
        return blake2b(told, digest_size=8).digest(), name

    return sorted(names, key=weight, reverse=True)


def least_loaded(root: str, loads: Mapping[str, int]) -> str:
    """The engine with the fewest calls under way, of equal ones the first in rendezvous order."""
    least = min(loads.values())
    return ranked(root, [name for name, load in loads.items() if load == least])[0]


def overloaded(name: str, loads: Mapping[str, int]) -> bool:
    """Whether an engine has so much more to do than the others that it takes no forks."""
    limit = math.ceil(OVERLOAD_FACTOR * (sum(loads.values()) + 1) / len(loads))
    return len(loads) > 1 and loads[name] >= max(limit, OVERLOAD_FLOOR)


def place(kin: Kinship, loads: Mapping[str, int], known: Collection[str]) -> Placed:
    """Where the call goes. `loads` are the calls under way on each engine that may take it, never empty;
    `known` all engines."""
    if kin.held_by in loads:
        return Placed(kin.held_by)
    if kin.held_by in known:
        return Placed(ranked(kin.root, loads)[0], f"{kin.held_by} takes no calls now")
    if kin.parent_on in loads:
        if not overloaded(kin.parent_on, loads):
            return Placed(kin.parent_on, "with its parent")
        others = [name for name in loads if not overloaded(name, loads)]
        return Placed(ranked(kin.root, others)[0], f"{kin.parent_on}, where its parent is, is overloaded")
    if kin.alone:
        return Placed(least_loaded(kin.root, loads), "least loaded")
    return Placed(ranked(kin.root, loads)[0], "by its root")
