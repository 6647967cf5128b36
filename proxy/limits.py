"""What each tenant may have at a time, counted where it is asked for."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

import msgspec

from lifecycle.core.pins import PinRoom
from lifecycle.tracker import Tracker
from proxy.config import Config, LimitsConfig
from proxy.errors import TooManyCalls

MINUTE_SECONDS = 60.0


class Limit(StrEnum):
    """What a tenant ran into."""

    CALLS = "concurrent_calls"
    CONTEXTS = "contexts"
    OPS = "ops"
    BRANCHES = "branches"
    PINS = "pins"
    BYTES = "pinned_bytes"


def limits_by_tenant(config: Config) -> Mapping[str, LimitsConfig]:
    """The limits of each tenant that has some of its own."""
    found = {}
    for tenant in config.tenants:
        own = {k: v for k, v in msgspec.structs.asdict(tenant.limits).items() if v is not None}
        if own:
            found[tenant.name] = msgspec.structs.replace(config.limits, **own)
    return found


class Limits:
    """Counts calls, contexts and operations of each tenant; pins and branches are counted in the books.

    `reached` is told of each refusal. Nothing here waits. `seconds` is a clock that never goes back.
    """

    def __init__(
        self,
        tracker: Tracker,
        general: LimitsConfig,
        own: Mapping[str, LimitsConfig] | None = None,
        reached: Callable[[str, Limit], None] = lambda tenant, limit: None,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracker = tracker
        self._general = general
        self._own = {} if own is None else own
        self._reached = reached
        self._seconds = seconds
        self._calls: dict[str, int] = {}
        self._opening: dict[str, set[str]] = {}
        self._allowances: dict[str, _Allowance] = {}

    def take(self, general: LimitsConfig, own: Mapping[str, LimitsConfig]) -> None:
        """These hold from now on; what somebody has more than that he keeps."""
        self._general, self._own = general, own

    def of(self, tenant: str) -> LimitsConfig:
        """What the tenant may have."""
        return self._own.get(tenant, self._general)

    def calls(self) -> Mapping[str, int]:
        """Calls under way, by tenant."""
        return self._calls

    @contextmanager
    def call(self, tenant: str) -> Iterator[None]:
        """One call, as long as the block runs. Raises `TooManyCalls`."""
        under_way = self._calls.get(tenant, 0)
        most = self.of(tenant).concurrent_calls
        if most is not None and under_way >= most:
            self._reached(tenant, Limit.CALLS)
            raise TooManyCalls(f"{under_way} calls are under way, and {most} are allowed at a time")
        self._calls[tenant] = under_way + 1
        try:
            yield
        finally:
            left = self._calls[tenant] - 1
            if left:
                self._calls[tenant] = left
            else:
                del self._calls[tenant]

    def open_context(self, tenant: str, uid: str) -> str:
        """Take room for a context that is about to be opened; answers why there is none, or an empty string.

        The room is taken until `opened`: until then the books do not count the context.
        """
        most = self.of(tenant).contexts
        if most is None:
            return ""
        states = self._tracker.contexts.states
        opening = self._opening.get(tenant, set())
        unseen = sum(not ((known := states.get(each)) and known.open) for each in opening if each != uid)
        if self._tracker.contexts.use.of(tenant).contexts + unseen >= most:
            self._reached(tenant, Limit.CONTEXTS)
            return f"context limit: {most} open contexts are allowed"
        self._opening.setdefault(tenant, set()).add(uid)
        return ""

    def opened(self, tenant: str, uid: str) -> None:
        """The context is in the books now, or never will be. Anything else changes nothing."""
        opening = self._opening.get(tenant)
        if opening is not None:
            opening.discard(uid)
            if not opening:
                del self._opening[tenant]

    def operation(self, tenant: str) -> float:
        """Count an operation. Answers 0, or in how many seconds there is room for it; then it is not counted.

        A minute's worth may come at once; what is spent comes back evenly.
        """
        most = self.of(tenant).ops_per_minute
        if most is None:
            return 0.0
        now = self._seconds()
        allowance = self._allowances.setdefault(tenant, _Allowance(float(most), now))
        allowance.left = min(most, allowance.left + (now - allowance.at) * most / MINUTE_SECONDS)
        allowance.at = now
        if allowance.left >= 1:
            allowance.left -= 1
            return 0.0
        self._reached(tenant, Limit.OPS)
        return (1 - allowance.left) * MINUTE_SECONDS / most if most else MINUTE_SECONDS

    def operation_refusal(self, tenant: str) -> str:
        """Why an operation is refused."""
        return f"operation limit: {self.of(tenant).ops_per_minute} a minute are allowed; send it again later"

    def pin_room(self, tenant: str, bytes_per_token: int) -> PinRoom:
        """What the tenant may still pin. `bytes_per_token` is 0 while the cache has not told."""
        limits, has = self.of(tenant), self._tracker.contexts.use.of(tenant)
        return PinRoom(
            bytes_per_token,
            None if limits.pinned_bytes is None else max(limits.pinned_bytes - has.pinned_bytes, 0),
            None if limits.pins is None else max(limits.pins - has.pins, 0),
        )


class _Allowance(msgspec.Struct):
    left: float
    at: float
