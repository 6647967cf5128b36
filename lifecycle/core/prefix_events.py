"""Events about prompts and what they share with others; of a context's stream, and taken from `events`."""

from lifecycle.core.namespace_events import LoggedEvent
from lifecycle.vocabulary import PrefixBreak


class PrefixDiverged(LoggedEvent, frozen=True, kw_only=True, tag="prefix_diverged.v1"):
    """A call's prompt leaves the one before it at message `index`, -1 for what stands before the messages.

    `role` is that of the message there, empty where there is none. `declared`: an operation had said so.
    `shared_tokens` are those of the whole chunks that both begin with, `lost_tokens` those that a prompt
    which went on would have had in the cache, and this one has not; -1 where they are not known. With
    `against` it is not the context's own last prompt that it leaves, but the head of that context.
    """

    call_id: str
    attempt: int
    kind: PrefixBreak
    index: int
    role: str = ""
    declared: bool = False
    shared_tokens: int = -1
    lost_tokens: int = -1
    against: str = ""
