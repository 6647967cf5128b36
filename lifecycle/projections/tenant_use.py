"""What each tenant has of what is limited: kept along with the books, read in constant time."""

from collections.abc import Iterator

import msgspec

from lifecycle.core.state import ContextState


class Use(msgspec.Struct, frozen=True):
    """Open contexts, pins, and the bytes that the pins hold."""

    contexts: int = 0
    pins: int = 0
    pinned_bytes: int = 0


class TenantUse:
    """Sums over the contexts of each tenant. `change` must see every state once, and what followed it."""

    def __init__(self) -> None:
        self._use: dict[str, Use] = {}

    def of(self, tenant: str) -> Use:
        """What the tenant has now."""
        return self._use.get(tenant, _NOTHING)

    def all(self) -> Iterator[tuple[str, Use]]:
        """Every tenant that has something."""
        return iter(self._use.items())

    def change(self, before: ContextState | None, after: ContextState | None) -> None:
        """A context was one and is the other; None where it is not known yet, or not any more."""
        old, new = _of_context(before), _of_context(after)
        state = after or before
        if old == new or state is None:
            return
        tenant = state.key.tenant
        had = self.of(tenant)
        has = Use(
            had.contexts + new.contexts - old.contexts,
            had.pins + new.pins - old.pins,
            had.pinned_bytes + new.pinned_bytes - old.pinned_bytes,
        )
        if has == _NOTHING:
            self._use.pop(tenant, None)
        else:
            self._use[tenant] = has


_NOTHING = Use()


def _of_context(state: ContextState | None) -> Use:
    if state is None or not (state.open or state.pins):
        return _NOTHING
    return Use(int(state.open), len(state.pins), sum(p.size_bytes for p in state.pins))
