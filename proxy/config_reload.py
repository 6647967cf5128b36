"""Takes a changed configuration over while the proxy runs: whole, or not at all.

What cannot be read or is wrong changes nothing, and the last good configuration stays in force. Of a good one
everything that can be changed under way is, at once; what needs a restart is named and waits for it.
"""

import asyncio
import os
from collections.abc import Callable, Sequence

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily

from lifecycle.projections.report_harm import HarmBudget
from proxy.config import Config, InvalidConfig, LimitsConfig, TenantConfig
from proxy.config_source import ConfigSource
from proxy.key_watch import KeyWatch
from proxy.limits import Limits, limits_by_tenant
from proxy.log_output import set_level
from proxy.metrics import Sample
from proxy.modes import Modes
from proxy.report import ReportKeeper

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
"""How often the file is looked at."""

TAKEN_OVER = frozenset(
    ("mode", "modes", "holdout", "harm", "limits", "tenants[].limits", "keys_file", "logging.level")
)
"""Settings, or sections of them, that a running proxy takes over; the others need a restart."""

ISOLATION = "tenants[].isolation"
"""A tenant gets a cache of its own at once. One that has it keeps it until a restart: a line that is missing
for a moment mixes nobody's calls with others'."""

_Stamp = tuple[int, int, int]


class Reloadable(msgspec.Struct, frozen=True):
    """The parts of a running proxy whose settings can change."""

    modes: Modes
    limits: Limits
    salted: set[str]
    reporting: ReportKeeper
    keys: KeyWatch


class ConfigReload:
    """`problem` says why the newest configuration was not taken over, `waiting` which settings differ from
    what was started with and count from the next start."""

    def __init__(
        self, started: Config, source: ConfigSource, parts: Reloadable, registry: CollectorRegistry
    ) -> None:
        self.problem = ""
        self.waiting: tuple[str, ...] = ()
        self.file = source.file
        self._started = self._newest = started
        self._load = source.load
        self._parts = parts
        self._seen = self._stamp()
        self._one_by_one = asyncio.Lock()
        self._reloads = Counter(
            "kvtether_config_reloads",
            "Times that a changed configuration was taken over or refused.",
            ["result"],
            registry=registry,
        )
        registry.register(Sample(self._sample))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator who changed the file does not get yet."""
        refused = (f"configuration: {self.problem}",) if self.problem else ()
        waiting = f"configuration: {', '.join(self.waiting)} changed: counts after a restart"
        return (*refused, waiting) if self.waiting else refused

    async def run(self) -> None:
        """Look at the file, for ever."""
        while self.file is not None:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Reload if the file is another than the one last seen."""
        if await asyncio.to_thread(self._stamp) != self._seen:
            await self.reload()

    async def reload(self) -> None:
        """Read everything anew and take it over, or say why not. Never raises for what stands there."""
        async with self._one_by_one:
            try:
                fresh, follow_keys = await asyncio.to_thread(self._read)
            except InvalidConfig as error:
                self.problem = f"{error}; the last good one stays in force"
                self._reloads.labels("refused").inc()
                log.error("the configuration is not taken over", problem=str(error))
                return
            self.problem = ""
            taken = [name for name in changes(self._newest, fresh) if is_taken_over(name)]
            waiting = [name for name in changes(self._started, fresh) if not is_taken_over(name)]
            salted = self._parts.salted
            taken += [ISOLATION] if fresh.salted - salted else []
            waiting += [ISOLATION] if salted - fresh.salted else []
            self.waiting = tuple(waiting)
            self._apply(fresh, taken, follow_keys)
            self._newest = fresh
            self._reloads.labels("applied").inc()
            log.info("the configuration was read", taken_over=taken)
            if self.waiting:
                log.warning("settings changed that count after a restart", settings=self.waiting)

    def _read(self) -> tuple[Config, Callable[[], None]]:
        # Before the content: a change behind it is seen at the next look.
        self._seen = self._stamp()
        fresh = self._load()
        return fresh, self._parts.keys.prepared(fresh)

    def _apply(self, fresh: Config, taken: Sequence[str], follow_keys: Callable[[], None]) -> None:
        """No await and nothing that fails: no call sees half of it."""
        parts = self._parts
        if {"mode", "modes", "holdout"} & set(taken):
            # Otherwise what was changed at run time stays as it is.
            parts.modes.take(fresh)
        parts.salted.update(fresh.salted)
        parts.limits.take(fresh.limits, limits_by_tenant(fresh))
        parts.reporting.report.harm.budget = HarmBudget(**msgspec.structs.asdict(fresh.harm))
        follow_keys()
        if "logging.level" in taken:
            set_level(fresh.logging.level)

    def _stamp(self) -> _Stamp | None:
        if self.file is None:
            return None
        try:
            found = os.stat(self.file)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _sample(self) -> Sequence[GaugeMetricFamily]:
        refused = GaugeMetricFamily(
            "kvtether_config_refused",
            "1 while the newest configuration is not in force, for something is wrong with it.",
            value=int(bool(self.problem)),
        )
        waiting = GaugeMetricFamily(
            "kvtether_config_waiting", "Changed settings that need a restart.", value=len(self.waiting)
        )
        return refused, waiting


def is_taken_over(name: str) -> bool:
    """Whether a running proxy takes a change of this setting over."""
    return any(name == each or name.startswith((f"{each}.", f"{each}[")) for each in TAKEN_OVER)


def changes(old: Config, new: Config) -> list[str]:
    """Settings that differ, as `section.name`; of tenants their limits: isolation does not go by what stood
    in the file before, but by what is in force."""
    found = []
    for name in _fields(Config):
        was, now = getattr(old, name), getattr(new, name)
        if was == now:
            continue
        if name == "tenants":
            found += ["tenants[].limits"] if _limits(was) != _limits(now) else []
        elif isinstance(now, msgspec.Struct):
            found += [
                f"{name}.{each}" for each in _fields(type(now)) if getattr(was, each) != getattr(now, each)
            ]
        else:
            found.append(name)
    return found


def _limits(tenants: Sequence[TenantConfig]) -> dict[str, LimitsConfig]:
    return {tenant.name: tenant.limits for tenant in tenants}


def _fields(struct: type[msgspec.Struct]) -> Sequence[str]:
    return struct.__struct_fields__
