"""A compaction: a one-off call sums messages up, then the summary stands in their place."""

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtether.context import Context


class Compaction:
    """`[start, stop)` of a context's list is being summed up, in a block of its own.

    Inside, `summariser` is the current context, for one call. `replace` says what stands there instead; what
    is not replaced by the end of the block stays. The summariser is closed at the end.
    """

    def __init__(self, context: "Context", summariser: "Context", start: int, stop: int) -> None:
        self.context = context
        self.summariser = summariser
        self.start = start
        self.stop = stop

    def replace(self, messages: Iterable[Any]) -> None:
        """The messages give way to these, in the context's own list too if it keeps one."""
        new = list(messages)
        if self.context.keeps_list:
            self.context.messages[self.start : self.stop] = new
        else:
            self.context.replace(self.start, self.stop, len(new))

    def __enter__(self) -> "Compaction":
        self.summariser.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.summariser.__exit__(kind, error, trace)

    async def __aenter__(self) -> "Compaction":
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)
