"""What a context of the brute-force model holds, and what is live by it: found by walking everything."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count

from lifecycle.vocabulary import VersionState, WaitKind
from tests.lifecycle.core.story import CHUNK, keys_of

STRONGEST_FIRST = list(VersionState)
_ids = count()


class Node:
    """A message behind its prefix. `tokens` is None while they are not known."""

    def __init__(self, word: str, parent: "Node | None", kind: str = "message") -> None:
        self.id = next(_ids)
        self.word = word
        self.parent = parent
        self.kind = kind
        self.tokens: tuple[str, ...] | None = None

    def path(self) -> list["Node"]:
        return [*(self.parent.path() if self.parent else []), self]

    def words(self) -> tuple[str, ...]:
        return tuple(n.word for n in self.path())

    def messages(self) -> list["Node"]:
        return [n for n in self.path() if n.kind == "message"]

    def own_keys(self) -> list[bytes]:
        """Keys of the chunks whose last token is this message's."""
        if self.tokens is None:
            return []
        before = [t for n in self.path()[:-1] for t in n.tokens or ()]
        return keys_of([*before, *self.tokens])[len(before) // CHUNK :]


class Answer:
    """What one attempt puts behind its list: the generation prompt, and what each choice generated."""

    def __init__(self, tail: Node) -> None:
        self.tail = tail
        self.choices: dict[int, Node] = {}

    def ends(self) -> list[Node]:
        return list(self.choices.values()) or [self.tail]


class Line:
    """One continuation of the context."""

    def __init__(self, number: int, tip: Node, since: int) -> None:
        self.number = number
        self.tip = tip
        self.answers: list[Answer] = []
        self.since = since
        self.doubted: int | None = None
        self.closed: Node | None = None


class Call:
    """One attempt in flight."""

    def __init__(self, name: str, attempt: int, words: Sequence[str], tip: Node, now: int) -> None:
        self.name = name
        self.attempt = attempt
        self.words = list(words)
        self.tip = tip
        self.answer = Answer(Node(f"{name}/{attempt}", tip, "tail"))
        self.arrived = now
        self.line: int | None = None
        self.concurrent = False
        self.stale = False
        self.cut: Node | None = None
        self.prefilled = False
        self.mapped = False
        self.pins: list[tuple[int, int]] = []
        self.closes = False
        self.reopened = False


class Hold:
    """A pin."""

    def __init__(self, tip: Node, until: int) -> None:
        self.tip = tip
        self.word = tip.word
        self.index = len(tip.messages()) - 1
        self.until = until
        self.moving = False


class Holdings:
    """What one context holds."""

    def __init__(self, now: int, *, one_off: bool = False) -> None:
        self.lines: list[Line] = []
        self.calls: list[Call] = []
        self.over: dict[tuple[str, int], tuple[Answer, list[str]]] = {}
        self.pins: list[Hold] = []
        self.pins_done: set[str] = set()
        self.attempts: Counter[str] = Counter()
        self.one_off = one_off
        self.open = True
        self.gap = False
        self.wait = WaitKind.UNKNOWN
        self.active = now
        self.num_lines = 0
        self.done = 0
        self.shown = 0
        self.held: dict[int, tuple[str, tuple[object, ...]]] = {}
        self.held_since = 0

    # -- what is live -------------------------------------------------------------------------------------

    def holders(self) -> Iterable[tuple[Node, VersionState]]:
        for pin in self.pins:
            yield pin.tip, VersionState.PINNED
        for call in self.calls:
            state = VersionState.SUSPENDED if call.prefilled else VersionState.ACTIVE
            for end in (call.tip, *call.answer.ends()):
                yield end, state
        for line in self.lines:
            state = VersionState.SUSPENDED if line.doubted is None else VersionState.DOUBTFUL
            for end in (line.tip, *(e for a in line.answers for e in a.ends())):
                yield end, state

    def live(self) -> dict[Node, VersionState]:
        out: dict[Node, VersionState] = {}
        for end, state in self.holders():
            for node in end.path():
                out[node] = min(out.get(node, state), state, key=STRONGEST_FIRST.index)
        for node, state in out.items():
            if state is VersionState.SUSPENDED and node.tokens is None:
                out[node] = VersionState.PENDING
        return out

    def references(self) -> Counter[bytes]:
        return Counter(key for node in self.live() for key in node.own_keys())

    def current(self) -> Line | None:
        return max(
            (x for x in self.lines if x.doubted is None), key=lambda x: (x.since, x.number), default=None
        )
