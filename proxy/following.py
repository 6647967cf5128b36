"""How following begins: the event log is opened, read, and waited for where it is away.

Until then calls are forwarded as they came. A proxy that starts while its log is away must not begin books of
its own: they would say of chunks that earlier contexts hold that nobody does.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import structlog

from lifecycle.errors import LifecycleError, LogUnavailable
from lifecycle.store.late import LateEventLog
from lifecycle.store.opening import OpenLog
from proxy.followed_call import MessageHasher
from proxy.hold_watch import HoldWatch
from proxy.modes import Modes
from proxy.ownership import Office

log = structlog.get_logger(__name__)

DIGEST_SECRET = "digest_secret"
DIGEST_SECRET_BYTES = 32

ASK_AGAIN_SECONDS = 1.0
"""Pause between attempts to open and read the log."""

LogOpener = Callable[[str], Awaitable[OpenLog]]


class Following:
    """Begins once; `begun` is set when calls are followed. `problem` says why not, and is empty if they are.

    `open_log` opens what `log_url` names, `event_log` is what the tracker then writes to.
    """

    def __init__(
        self,
        log_url: str,
        open_log: LogOpener,
        event_log: LateEventLog,
        office: Office,
        hasher: MessageHasher,
        holds: HoldWatch,
        modes: Modes,
    ) -> None:
        self.problem = "the event log has not been read yet, nothing is followed until it is"
        self.begun = asyncio.Event()
        self._log_url = log_url
        self._open_log = open_log
        self._event_log = event_log
        self._office = office
        self._hasher = hasher
        self._holds = holds
        self._modes = modes
        self._opened: OpenLog | None = None
        self._adopted = False
        modes.unfollowed = True

    async def begin(self) -> bool:
        """Try once. False if it is worth another try, True if following began or never will."""
        try:
            await self._begin()
        except LogUnavailable as error:
            self._say(f"the event log cannot be opened, nothing is followed until it can: {error}")
            return False
        except LifecycleError as error:
            self._say(f"the event log cannot be read, nothing is followed: {error}")
        return True

    async def keep_trying(self) -> None:
        """Until following began, or never will."""
        while True:
            await asyncio.sleep(ASK_AGAIN_SECONDS)
            if await self.begin():
                return

    async def _begin(self) -> None:
        """What was reached in an earlier attempt is not done again."""
        if self._opened is None:
            self._opened = await self._open_log(self._log_url)
            self._event_log.open_for_reading(self._opened.event_log)
        secret = await self._opened.settings.get_or_create(
            DIGEST_SECRET, lambda: secrets.token_bytes(DIGEST_SECRET_BYTES)
        )
        self._hasher.rekey(secret)
        if not self._adopted:
            self._adopted = True
            await self._adopt_holds(self._opened)
        await self._office.log_keeper.start(self._opened.snapshots)
        self._event_log.open_for_writing()
        await self._office.join(self._opened.join(self._office.name))
        self.problem = ""
        self._modes.unfollowed = False
        self.begun.set()

    async def _adopt_holds(self, opened: OpenLog) -> None:
        """Take over what an earlier run held. Without its vault we go on; its holds stay until it is back."""
        if opened.open_vault is None:
            return
        try:
            await self._holds.adopt(await opened.open_vault())
        except LifecycleError as error:
            log.error(
                "pins of this run are lost at its end, those of earlier runs stay held", error=str(error)
            )

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            log.error(problem)
        self.problem = problem
