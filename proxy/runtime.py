"""Everything that lives as long as the proxy, built by name and closed in reverse order."""

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from engine_bridge.call_blocks import CallBlocks
from engine_bridge.drift_watch import DriftWatch
from engine_bridge.placement_watch import PlacementWatch
from engine_bridge.verifier import Verifier
from lifecycle.core.ids import Namespace
from lifecycle.log_keeper import LogKeeper
from lifecycle.ports import CacheControl, SelfTest
from lifecycle.reclaimer import Reclaimer
from lifecycle.store.late import LateEventLog
from lifecycle.store.opening import open_log
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Mode
from proxy.auth import Authenticator
from proxy.backend_health import BackendHealth
from proxy.backend_loss import BackendLoss
from proxy.backend_metrics import BackendMetrics
from proxy.backends import Backends
from proxy.cache_driver import cache_driver
from proxy.config import Config, api_key
from proxy.declarations import Declarations
from proxy.drain import Drain
from proxy.engine_reach import EngineReach
from proxy.event_reading import EventReading, no_events
from proxy.followed_call import MessageHasher
from proxy.following import DIGEST_SECRET_BYTES, Following, LogOpener
from proxy.forgetting import Forgetting
from proxy.hold_watch import HoldWatch
from proxy.hook_reports import HookReports
from proxy.key_watch import KeyWatch, refuse_strangers
from proxy.limits import Limits, limits_by_tenant
from proxy.lineage import LineageIndex
from proxy.mailbox import Mailboxes
from proxy.metrics import Metrics
from proxy.modes import Modes
from proxy.ownership import Office
from proxy.pin_keeper import PinKeeper
from proxy.placing import Placing
from proxy.read_models import ReadModelLoop
from proxy.report import ReportKeeper
from proxy.system import RandomIds, SystemClock
from proxy.tasks import Tasks, owned_tasks
from proxy.tracking import Tracking

log = structlog.get_logger(__name__)

SETTLE_SECONDS = 10.0


class Runtime:
    """The parts, and the loops that keep them going. Built by `open_runtime`."""

    def __init__(
        self,
        config: Config,
        tasks: Tasks,
        cache: CacheControl | None = None,
        opener: LogOpener = open_log,
    ) -> None:
        self.config = config
        self.event_log = LateEventLog()
        self.clock = SystemClock()
        self.ids = RandomIds()
        self.modes = Modes(config, lambda: self.tracker.contexts.demotions)
        self.auth = Authenticator([api_key(k, os.environ) for k in config.api_keys])
        self.keys = KeyWatch(config, self.auth.take)
        self.hasher = MessageHasher(secrets.token_bytes(DIGEST_SECRET_BYTES))
        self.backends = Backends(config)
        self.health = BackendHealth(self.backends)
        self.reach = EngineReach(config, self.backends, self.modes)
        self.prepared, self.models = self.reach.prepared, self.reach.models
        self.cache = cache or cache_driver(
            config,
            self.reach.tokenize if config.models else None,
            lambda *told: self.metrics.controlled(*told),
        )
        self.reach.cache = self.cache
        self.blocks = CallBlocks()
        self.tracker = Tracker(
            self.event_log,
            self.clock,
            config.retention_hours * 3600,
            config.keep_recurring_seconds,
            self.ids.new("proxy"),
        )
        self.metrics = Metrics(self.tracker)
        self.limits = Limits(self.tracker, config.limits, limits_by_tenant(config), self.metrics.limited)
        self.salted = set(config.salted)
        self.metrics.show_tenants(self.limits.calls)
        if self.backends.several:
            BackendMetrics(self.metrics.registry, self.backends, self.contexts_by_backend)
        self.reclaimer = Reclaimer(
            self.tracker,
            self.cache,
            self.ids,
            self.mode_of,
            self.objection,
            lambda uid: self.pins.changing(uid),
            lambda: self.office.plans,
            lambda: self.office.shared,
        )
        self.tasks = tasks
        self.mailboxes = Mailboxes(tasks)
        self.declarations = Declarations(
            self.tracker,
            self.mailboxes,
            self.ids,
            self.limits,
            lambda: self.self_test.bytes_per_token,
            lambda: self.cache.capabilities,
            self._default_namespace,
        )
        self.hooks = HookReports(self.tracker, self.declarations, self.mailboxes, self.limits, tasks)
        self.placing = Placing(self.backends, self.tracker)
        self.tracking = Tracking(
            self.tracker,
            self.reclaimer,
            Verifier(
                self.tracker,
                self.cache,
                self.blocks,
                blind=lambda: self.placement.blind,
                several=self.backends.several,
            ),
            self.declarations,
            self.mailboxes,
            self.models,
            self.modes,
            LineageIndex(),
            self.hasher,
            self.ids,
            tasks,
            self.limits,
            self.placing.place,
            config.plan_wait_seconds,
        )
        self.metrics.show_mapping(lambda: self.reach.mapping_backlog.waiting_chars)
        self.tracker.listeners.append(Forgetting(self.tracker, self.models, self.tracking.calls).heard)
        self.placement = PlacementWatch(self.tracker, self.cache, lambda: self.office.in_office)
        self.read_models = ReadModelLoop(config, self.tracker, self.metrics.registry)
        self.log_keeper = LogKeeper(self.tracker, self.event_log, (self.read_models.position,))
        self.metrics.show_log(self.log_keeper)
        self.office = Office(self.tracker, self.log_keeper, self.reclaimer.settled)
        self.office.taken_over.append(lambda: self.placement.doubt("this proxy took over"))
        self.drift = DriftWatch(
            self.tracker, self.cache, self.placement, self.reclaimer, self.ids, self.metrics.drifted
        )
        self.holds = HoldWatch(
            self.cache,
            self.tracker,
            lambda uid: self.pins.changing(uid),
            lambda: self.self_test.ok and not self.following.problem,
            self.placement.doubt,
            self.metrics.pin_repairs,
        )
        self.metrics.show_holds(self.holds)
        self.pins = PinKeeper(
            self.tracker,
            self.reclaimer,
            self.ids,
            self.mode_of,
            self.objection,
            self.models,
            self.holds.save,
        )
        self.following = Following(
            config.log_url, opener, self.event_log, self.office, self.hasher, self.holds, self.modes
        )
        self.losses = BackendLoss(self.tracker, self.placement, lambda: self.office.holds)
        self.backends.lost.append(self.losses.gone)
        self.backends.found.append(self.losses.back)
        self.event_reading = EventReading(self.backends, self.blocks, self.placement, self.losses.heard)
        self.reporting = ReportKeeper(
            self.tracker,
            self.event_log,
            self.cache,
            self.modes,
            config.harm,
            tasks,
            self.metrics,
            self.following.begun,
            lambda: self.office.holds,
        )
        self.drain = Drain(config.drain)
        self.told_beside: list[Callable[[], Sequence[str]]] = []
        self.stopping = asyncio.Event()
        """Set when the process is about to end: whoever streams without an end must end."""

    @property
    def self_test(self) -> SelfTest:
        """What the last self-test found."""
        return self.reach.self_test

    @property
    def problems(self) -> tuple[str, ...]:
        """Everything that keeps us from controlling the cache, each with its fix."""
        found = list(self.self_test.problems)
        found += [f"model {m.name or '?'}: {m.reason}" for m in self.models.values() if m.reason]
        if not self.models:
            found.append("no model is configured: set models[].path, or pass --model-path")
        if self.cache.capabilities.level and not self.blocks.live:
            found.append(no_events([backend.name for backend in self.event_reading.silent]))
        found += self.reporting.problems
        if self.following.problem:
            found.append(self.following.problem)
        elif self.tracker.degraded:
            found.append(self.tracker.degraded)
        return tuple(found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong without standing against control."""
        keys = (self.keys.problem,) if self.keys.problem else ()
        gone = [f"engine {b.name} takes no calls: {b.down}" for b in self.backends.all if b.down]
        more = [text for told in self.told_beside for text in told()]
        known = (*keys, *gone, *self.reach.warnings)
        return (*known, *self.read_models.warnings, *self.log_keeper.warnings, *more)

    def contexts_by_backend(self) -> Counter[str]:
        """Open contexts by the engine that served them last."""
        return Counter(s.backend for s in self.tracker.contexts.states.values() if s.open)

    def mode_of(self, uid: str) -> Mode:
        """The mode of a context now.

        One that is not known any more only observes, and so does one that was mapped otherwise than its
        model is now: by another tokenizer, template or engine version.
        """
        state = self.tracker.contexts.states.get(uid)
        model = self.models.get(state.namespace.model) if state is not None else None
        if state is None or model is None or model.fingerprint != state.namespace.fingerprint:
            return Mode.OBSERVE
        return self.modes.of_context(uid, state.namespace.model, state.key.tenant)

    def objection(self, namespace: Namespace) -> str:
        """Why nothing of this namespace may be touched now; empty if it may."""
        if self.following.problem or not self.office.holds:
            return self.following.problem or self.office.objection
        if not self.self_test.ok:
            return "; ".join(self.self_test.problems) or "the self-test failed"
        if self.modes.bypass_all:
            return "everything is in bypass"
        model = self.models.get(namespace.model)
        if model is None:
            return f"no model {namespace.model!r} is configured"
        return model.reason if model.name in self.modes.observe_only else ""

    # -- loops --------------------------------------------------------------------------------------------

    async def reclaim(self) -> None:
        """Free the dead, for ever. Before the first self-test nobody knows whether they may be freed."""
        await self._able()
        await self.reclaimer.run()

    async def keep_pins(self) -> None:
        """Hold what is pinned, for ever; not before the first self-test either."""
        await self._able()
        await self.pins.run()

    async def watch_holds(self) -> None:
        """Compare what the cache holds with what it should, for ever."""
        await self._able()
        await self.holds.run()

    async def watch_placement(self) -> None:
        """Notice what left the cache behind our back, for ever."""
        await self.following.begun.wait()
        if self.tracker.contexts.position:
            self.placement.doubt("the proxy was restarted")
        await self.placement.run()

    async def _able(self) -> None:
        """Until we know what is true, and whether the cache may be touched."""
        await self.following.begun.wait()
        await self.prepared.wait()

    async def settled(self) -> None:
        """Let the contexts' queues run empty, as far as that takes no longer than `SETTLE_SECONDS`."""
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                await self.hooks.settled()
                await self.mailboxes.settled()
                await self.tracker.flushed()
        except TimeoutError:
            log.warning("some calls are not recorded to their end")

    def _default_namespace(self) -> Namespace | None:
        return next((self.tracking.namespace(name, "") for name in self.models), None)


@asynccontextmanager
async def open_runtime(
    config: Config, cache: CacheControl | None = None, opener: LogOpener = open_log
) -> AsyncIterator[Runtime]:
    """Open the log, rebuild what is true, start the loops; on exit let work settle, then close.

    `cache` stands in for the driver that the configuration names, `opener` for what opens its log. A log that
    is away is waited for behind the scenes, and until it was read the proxy forwards and follows nothing:
    calls fail open. Raises `InvalidConfig`.
    """
    async with AsyncExitStack() as stack:
        resources = await stack.enter_async_context(AsyncExitStack())
        tasks = await stack.enter_async_context(owned_tasks())
        runtime = Runtime(config, tasks, cache, opener)
        runtime.keys.begin()
        refuse_strangers(config, runtime.auth)
        resources.push_async_callback(runtime.event_log.close)
        resources.push_async_callback(runtime.office.close)
        resources.push_async_callback(runtime.cache.close)
        resources.push_async_callback(runtime.backends.close)
        resources.push_async_callback(runtime.reach.close)
        stack.push_async_callback(runtime.settled)
        if not await runtime.following.begin():
            tasks.keep(runtime.following.keep_trying)
        for loop in (
            runtime.keys.run,
            runtime.health.run,
            runtime.reach.run,
            runtime.event_reading.run,
            runtime.office.keep_time,
            runtime.read_models.run,
            runtime.watch_placement,
            runtime.reporting.run,
            runtime.tracking.lineage.recall,
            runtime.office.follow,
            runtime.office.keep,
        ):
            tasks.keep(loop)
        for loop in (
            runtime.reclaim,
            runtime.keep_pins,
            runtime.watch_holds,
            runtime.log_keeper.run,
            runtime.drift.run,
            runtime.losses.run,
            runtime.reporting.look,
        ):
            tasks.keep(runtime.office.while_owner(loop))
        yield runtime
