"""Keeps the report up to date: reads the log behind the calls, follows what becomes true, watches the budget.

The report is rebuilt at each start from what the log still holds, behind the calls; until it has caught up,
`complete` is False and what it says covers less.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Sequence

import msgspec
import structlog

from engine_bridge.errors import CacheUnavailable
from lifecycle.core.events import ChunksGone, EnforcementRearmed, HarmBudgetExceeded, RecordedEvent
from lifecycle.core.ids import Namespace
from lifecycle.core.plan import DEMOTED, FRESH
from lifecycle.errors import LifecycleError, LogUnavailable
from lifecycle.ports import CacheControl, EventLog
from lifecycle.projections.report import Report
from lifecycle.projections.report_harm import Harm, HarmBudget
from lifecycle.tracker import Tracker
from lifecycle.vocabulary import Mode
from proxy.config import HarmConfig
from proxy.metrics import Metrics
from proxy.modes import Modes
from proxy.tasks import Tasks

log = structlog.get_logger(__name__)

EVENTS_PER_TURN = 100
"""Events of the past that are read before calls get their turn: about a millisecond."""

ASK_AGAIN_SECONDS = 1.0

SAMPLE_SECONDS = 1.0
FINE_SAMPLES = 900
"""Samples of the last quarter of an hour, one a second."""

COARSE_EVERY = 60
COARSE_SAMPLES = 24 * 60
"""Samples of the last day, one a minute."""

REST_PER_SAMPLE = 50.0
"""Rest after a sample, as a multiple of the time that it took."""

LOOK_SECONDS = 10.0
KEYS_PER_LOOK = 2_000
"""Dead chunks, only observed, that the cache is asked for at once: does it hold them still?"""


class DeadSample(msgspec.Struct, frozen=True, kw_only=True):
    """How much lay dead in the caches, and how much lay there that we know of."""

    at_ns: int
    dead_tokens: int
    dead_bytes: int
    resident_tokens: int
    resident_bytes: int


class ReportKeeper:
    """`report` is what was counted, `samples` and `coarse_samples` what lay dead over time, oldest first.

    Nothing is read before `begun` is set: then the books are.
    """

    def __init__(
        self,
        tracker: Tracker,
        event_log: EventLog,
        cache: CacheControl,
        modes: Modes,
        harm: HarmConfig,
        tasks: Tasks,
        metrics: Metrics,
        begun: asyncio.Event,
    ) -> None:
        self.report = Report(HarmBudget(**msgspec.structs.asdict(harm)))
        self.caught_up = asyncio.Event()
        self.samples: deque[DeadSample] = deque(maxlen=FINE_SAMPLES)
        self.coarse_samples: deque[DeadSample] = deque(maxlen=COARSE_SAMPLES)
        metrics.weigh_chunks(self._chunk_bytes)
        self._tracker = tracker
        self._log = event_log
        self._cache = cache
        self._modes = modes
        self._tasks = tasks
        self._metrics = metrics
        self._begun = begun
        self._demoting: set[tuple[str, str]] = set()
        self._told = 0
        tracker.listeners.append(self._heard)

    @property
    def complete(self) -> bool:
        """Whether the whole log has been read."""
        return self.caught_up.is_set()

    @property
    def demotions(self) -> Collection[tuple[str, str]]:
        """Models and tenants that lost control."""
        return self._tracker.contexts.demotions.keys()

    @property
    def problems(self) -> list[str]:
        """Who lost control because too much was regretted, and how to give it back."""
        return [_told(event) for _, event in sorted(self._tracker.contexts.demotions.items())]

    async def run(self) -> None:
        """Read what the log holds, then sample, for ever."""
        await self._begun.wait()
        while not self.complete:
            try:
                await self._catch_up()
            except LifecycleError as error:
                log.warning("the report waits for the event log", error=str(error))
                await asyncio.sleep(ASK_AGAIN_SECONDS)
        clock = asyncio.get_running_loop().time
        number = 0
        while True:
            began = clock()
            self.sample()
            if number % COARSE_EVERY == 0:
                self.coarse_samples.append(self.samples[-1])
            number += 1
            await asyncio.sleep(max(SAMPLE_SECONDS, (clock() - began) * REST_PER_SAMPLE))

    async def look(self) -> None:
        """Ask the cache for what is dead and only observed, for ever: nobody else notices when it leaves."""
        await self._begun.wait()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look_once()
            except (CacheUnavailable, LogUnavailable) as error:
                log.warning("dead chunks are looked at again", error=str(error))

    async def look_once(self) -> None:
        """Ask for some of them. Raises `CacheUnavailable`, `LogUnavailable`."""
        for namespace in self._tracker.contexts.index.namespaces():
            await self._look_at(namespace)

    async def rearm(self, model: str, tenant: str) -> list[tuple[str, str]]:
        """An operator set enforce: whoever it names has the whole budget again; empty names everybody.

        Raises `LogUnavailable`: then some are not rearmed.
        """
        rearmed = []
        for pair in list(self._tracker.contexts.demotions):
            if model in ("", pair[0]) and tenant in ("", pair[1]):
                event = EnforcementRearmed(
                    at_ns=self._tracker.clock.now_ns(), namespace=Namespace(pair[0]), tenant=pair[1]
                )
                await self._tracker.record(event.namespace, [event])
                log.warning("enforcement rearmed", model=pair[0], tenant=pair[1])
                rearmed.append(pair)
        return rearmed

    def sample(self) -> DeadSample:
        """What lies dead now, and what lies there."""
        index, report = self._tracker.contexts.index, self.report
        totals = [0, 0, 0, 0]
        for namespace in index.namespaces():
            size, token_bytes = report.chunk_tokens(namespace), report.token_bytes(namespace)
            stats, observed = index.stats(namespace), report.watch.num_suppressed(namespace)
            asked_for = sum(
                run.flags.count(FRESH) + run.flags.count(DEMOTED)
                for run in index.dead_runs(namespace, demoted=True)
            )
            dead = observed + asked_for + stats.pending
            resident = max(stats.verified + observed, dead)
            for at, amount in enumerate((dead, dead * token_bytes, resident, resident * token_bytes)):
                totals[at] += amount * size
        sample = DeadSample(
            at_ns=self._tracker.clock.now_ns(),
            dead_tokens=totals[0],
            dead_bytes=totals[1],
            resident_tokens=totals[2],
            resident_bytes=totals[3],
        )
        self.samples.append(sample)
        return sample

    def _chunk_bytes(self, namespace: Namespace) -> int:
        return self.report.chunk_tokens(namespace) * self.report.token_bytes(namespace)

    async def _catch_up(self) -> None:
        contexts = self._tracker.contexts
        for state in list(contexts.states.values()):
            self.report.know(state)
        number = 0
        while self.report.position < contexts.position:
            async for recorded in self._log.read_all(self.report.position):
                self.report.apply(recorded)
                number += 1
                if number % EVENTS_PER_TURN == 0:
                    await asyncio.sleep(0)
        self.caught_up.set()
        self._told = self.report.harm.regretted_tokens
        self._judge()

    def _heard(self, batch: Sequence[RecordedEvent]) -> None:
        if not self.complete:
            return
        for recorded in batch:
            if recorded.position > self.report.position:
                self.report.apply(recorded)
        fresh = self.report.harm.regretted_tokens - self._told
        if fresh:
            self._told += fresh
            self._metrics.regretted.inc(fresh)
            self._judge()

    def _judge(self) -> None:
        for harm in self.report.harm.all(self._tracker.clock.now_ns()):
            pair = (harm.model, harm.tenant)
            enforced = self._modes.of(*pair) is Mode.ENFORCE
            if harm.exceeded and enforced and pair not in self._demoting:
                self._demoting.add(pair)
                self._tasks.spawn(self._demote(harm))

    async def _demote(self, harm: Harm) -> None:
        """Recorded first: the books of every proxy, and of every later start, then say so."""
        event = HarmBudgetExceeded(
            at_ns=self._tracker.clock.now_ns(),
            namespace=Namespace(harm.model),
            tenant=harm.tenant,
            regretted_tokens=harm.regretted_tokens,
            prompt_tokens=harm.prompt_tokens,
            allowed_tokens=harm.allowed_tokens,
            window_seconds=harm.window_seconds,
        )
        log.error(
            "harm budget exceeded: this model and tenant only observe from now on",
            model=harm.model,
            tenant=harm.tenant,
            regretted_tokens=harm.regretted_tokens,
            allowed_tokens=harm.allowed_tokens,
            prompt_tokens=harm.prompt_tokens,
        )
        while True:
            try:
                await self._tracker.record(event.namespace, [event])
            except LogUnavailable as error:
                log.warning("a demotion waits for the event log", error=str(error))
                await asyncio.sleep(ASK_AGAIN_SECONDS)
            else:
                self._demoting.discard((harm.model, harm.tenant))
                return

    async def _look_at(self, namespace: Namespace) -> None:
        keys = self.report.watch.observed_keys(namespace, KEYS_PER_LOOK)
        if not keys:
            return
        gone = [p.key for p in await self._cache.locate(namespace, keys) if not p.tiers]
        if gone:
            event = ChunksGone(
                at_ns=self._tracker.clock.now_ns(),
                namespace=namespace,
                keys=b"".join(gone),
                reason="left the cache while dead",
            )
            await self._tracker.record(namespace, [event])


def _told(event: HarmBudgetExceeded) -> str:
    model, tenant = event.namespace.model, event.tenant
    hours = event.window_seconds / 3600
    rule = f'{{"modes":[{{"mode":"enforce","model":"{model}","tenant":"{tenant}"}}]}}'
    return (
        f"harm budget: {event.regretted_tokens:,} tokens freed for model {model}, tenant {tenant} were "
        f"wanted again in {hours:g} h, {event.allowed_tokens:,} are allowed: nothing of theirs is freed. "
        "`kvtether report --by agent` tells whose edits come back; when that is mended, rearm with "
        f"PATCH /kv/v1/config {rule}"
    )
