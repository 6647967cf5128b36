"""A brute-force model of one context: plain objects and explicit lists, no events, no tree that is pruned.

Written from the rules alone, in the order a reader would tell them. It is slow and keeps no index: what is
live is found by walking everything that holds something, every time it is asked for.
"""

from collections.abc import Iterable, Sequence

from lifecycle.vocabulary import WaitKind
from tests.lifecycle.core.lifecycle_holdings import Answer, Call, Hold, Holdings, Line, Node
from tests.lifecycle.core.story import SECOND, keys_of, prompt_tokens

LEASES = {WaitKind.TOOL: 900, WaitKind.UNKNOWN: 1800, WaitKind.HUMAN: 3600, WaitKind.SUBAGENT: 3600}


class Model(Holdings):
    """One context."""

    # -- lists --------------------------------------------------------------------------------------------

    def fork(self, now: int, upto: int | None) -> "Model":
        """A child that takes the list of the last call that ended."""
        child = Model(now)
        closed = [x for x in self.lines if x.doubted is None and x.closed is not None]
        if not closed:
            return child
        line = max(closed, key=lambda x: (x.since, x.number))
        assert line.closed is not None
        messages = line.closed.messages()
        tip, answers = line.closed, line.answers if line.closed is line.tip else []
        if upto is not None and upto <= len(messages):
            answers = []
            if upto < len(messages):
                parent = messages[upto].parent
                assert parent is not None
                tip = parent
        mine: dict[Node, Node] = {}

        def copied(node: Node) -> Node:
            for old in node.path():
                if old not in mine:
                    mine[old] = Node(old.word, mine[old.parent] if old.parent else None, old.kind)
                    mine[old].tokens = old.tokens
            return mine[node]

        taken = {n for end in (tip, *(e for a in answers for e in (a.tail, *a.ends()))) for n in end.path()}
        for node in sorted(taken, key=lambda n: n.id):
            copied(node)
        inherited = Line(0, copied(tip), now)
        inherited.closed = inherited.tip
        for answer in answers:
            kept = Answer(copied(answer.tail))
            kept.choices = {c: copied(n) for c, n in answer.choices.items()}
            inherited.answers.append(kept)
        child.lines, child.num_lines = [inherited], 1
        return child

    # -- calls --------------------------------------------------------------------------------------------

    def arrive(
        self,
        name: str,
        words: Sequence[str],
        now: int,
        *,
        pins: Sequence[tuple[int, int]] = (),
        closes: bool = False,
        shown: int = 0,
    ) -> None:
        wanted = ("head", *words)
        known = [
            n for n in self.live() if n.kind in ("head", "message") and n.words() == wanted[: len(n.path())]
        ]
        kept = max(known, key=lambda n: (len(n.path()), n.id), default=None)
        on_path = kept.path() if kept else []

        def shared(line: Line) -> int:
            return max((on_path.index(n) for n in line.tip.path() if n in on_path), default=-1)

        goes_on = [x for x in self.lines if x.tip in on_path]
        line = max(
            goes_on or self.lines,
            key=lambda x: (shared(x), x.doubted is None, x.since, x.number),
            default=None,
        )
        tip = kept or Node("head", None, "head")
        for word in words[len(on_path) - 1 if on_path else 0 :]:
            tip = Node(word, tip)
        self.attempts[name] += 1
        call = Call(name, self.attempts[name], words, tip, now)
        call.line = line.number if line else None
        call.concurrent = any(c.name != name for c in self.calls)
        call.pins, call.closes = list(pins), closes
        call.reopened = not self.open or any(c.reopened for c in self.calls)
        self.calls.append(call)
        self.open, self.active = True, now
        self.shown = max(self.shown, shown)

    def call(self, name: str, attempt: int) -> Call | None:
        return next((c for c in self.calls if (c.name, c.attempt) == (name, attempt)), None)

    def map(self, name: str, attempt: int, stripped: Iterable[str], now: int) -> None:
        call = self.call(name, attempt)
        if call is not None:
            if call.mapped:
                return
            answer, words = call.answer, call.words
        else:
            if (name, attempt) not in self.over:
                return
            answer, words = self.over[name, attempt]
            if answer.tail.tokens is not None or not any(answer in x.answers for x in self.lines):
                return
        parts = prompt_tokens(words, stripped=stripped)
        moved: dict[Node, Node] = {}
        for node, tokens in zip(answer.tail.path(), parts, strict=True):
            parent = moved.get(node.parent) if node.parent else None
            if parent is None and node.tokens in (None, tuple(tokens)):
                node.tokens = tuple(tokens)
            else:
                moved[node] = Node(node.word, parent or node.parent, node.kind)
                moved[node].tokens = tuple(tokens)
        old_tip = answer.tail.parent
        assert old_tip is not None
        tip = moved.get(old_tip, old_tip)
        for line in self.lines:
            mine = (
                call.prefilled and not call.stale and line.doubted is None if call else answer in line.answers
            )
            if line.tip is old_tip and mine:
                line.tip = tip
                if line.closed is not None:
                    line.closed = moved.get(line.closed, line.closed)
        answer.tail = moved.get(answer.tail, answer.tail)
        self.gap = False
        if call is None:
            return
        call.tip, call.mapped = tip, True
        call.cut = moved.get(call.cut, call.cut) if call.cut else None
        self._own_pins(call, now)

    def map_none(self, name: str, attempt: int, now: int) -> None:
        """It is known that the tokens will not be known."""
        call = self.call(name, attempt)
        if call is None or call.mapped:
            return
        call.mapped = True
        self._own_pins(call, now)

    def _own_pins(self, call: Call, now: int) -> None:
        if call.name not in self.pins_done:
            for span in call.pins:
                self._pin(call.tip, span, 300 * SECOND, now)
        if call.pins:
            self.pins_done.add(call.name)
        if call.prefilled and not call.stale and self.open and not self.one_off:
            self._follow(call.tip)

    def first(self, name: str, attempt: int, now: int) -> None:
        call = self.call(name, attempt)
        if call is not None and not call.prefilled:
            self._commit(call, now)

    def _together(self, line: Line, call: Call) -> bool:
        return line.since > call.arrived or any(
            line.tip in other.tip.path() for other in self.calls if other is not call
        )

    def _commit(self, call: Call, now: int) -> None:
        call.prefilled = True
        if not self.open or self.one_off:
            return
        if call.stale:
            if not self.lines and call.cut is not None:
                self._line(call.cut, now)
            return
        path = call.tip.path()
        going_on = [x for x in self.lines if x.tip in path]
        line = next((x for x in going_on if x.number == call.line), None) or max(
            going_on, key=lambda x: (len(x.tip.path()), x.doubted is None, x.number), default=None
        )
        if line is not None:
            self._advance(call, line, now)
        else:
            left = next(
                (x for x in self.lines if x.number == call.line and x.doubted is None), self.current()
            )
            self._line(call.tip, now)
            if left is not None and not call.concurrent and not self._together(left, call):
                left.doubted = now
        self._follow(call.tip)

    def _line(self, tip: Node, now: int) -> Line:
        line = Line(self.num_lines, tip, now)
        self.num_lines += 1
        self.lines.append(line)
        return line

    def _advance(self, call: Call, line: Line, now: int) -> None:
        grows, returns = line.tip is not call.tip, line.doubted is not None
        if grows and not self.gap:
            self.lines = [x for x in self.lines if x is line or x.doubted is None or x.doubted > call.arrived]
        if grows:
            tokens = [t for n in call.answer.tail.path() for t in n.tokens or ()]
            chain = keys_of(tokens)
            ends = [e for a in line.answers for e in a.ends()]
            known = call.answer.tail.tokens is not None and all(e.tokens is not None for e in ends)
            lost = bool(ends) and not (
                known
                and all(
                    chain[: len(c)] == c for c in ([k for n in e.path() for k in n.own_keys()] for e in ends)
                )
            )
        else:
            lost = line.since <= call.arrived and any(
                a.tail.word.split("/")[0] != call.name for a in line.answers
            )
        rest: Line | None = None
        if lost:
            rest = self._line(line.tip, line.since)
            rest.answers, rest.doubted, rest.closed = line.answers, now, line.closed
        if lost or grows:
            line.answers = []
        line.tip, line.since, line.doubted = call.tip, now, None
        if grows or returns:
            for other in self.lines:
                if other is not line and other.doubted is None and not self._together(other, call):
                    other.doubted = now

    def generate(self, name: str, attempt: int, choice: int, tokens: Sequence[str]) -> None:
        call = self.call(name, attempt)
        if call is not None:
            answer = call.answer
        elif (name, attempt) in self.over:
            answer = self.over[name, attempt][0]
        else:
            return
        if answer.tail.tokens is None:
            return
        if choice not in answer.choices:
            answer.choices[choice] = Node(f"{name}/{attempt}/{choice}", answer.tail, "generation")
        answer.choices[choice].tokens = tuple(tokens)

    def end(self, name: str, attempt: int, completed: bool, wait: WaitKind, now: int) -> None:
        call = self.call(name, attempt)
        if call is None:
            return
        if completed and not call.prefilled:
            self._commit(call, now)
        for line in self.lines:
            if call.prefilled and not call.stale and line.tip is call.tip and line.doubted is None:
                if completed:
                    line.answers = [*line.answers, call.answer]
                line.since, line.closed = now, line.tip
            elif call.prefilled and call.stale and line.tip is call.cut:
                line.since, line.closed = now, line.tip
        self.calls.remove(call)
        if completed:
            self.over[name, attempt] = (call.answer, call.words)
            self.wait = wait
        self.active = now
        if any(c.name == name for c in self.calls):
            return
        computed = completed or call.prefilled
        stays_closed = call.reopened and not computed and not self.calls and not self.lines
        if self.one_off or (call.closes and computed) or stays_closed:
            self.close()

    def close(self) -> None:
        self.open, self.lines = False, []

    # -- operations ---------------------------------------------------------------------------------------

    def operate(self, seq: int, kind: str, fields: tuple[object, ...], now: int) -> None:
        if seq <= self.done or seq in self.held:
            return
        if seq > self.done + 1:
            self.held[seq] = (kind, fields)
            self.held_since = self.held_since or now
            return
        self._effect(seq, kind, fields, now)
        while self.done + 1 in self.held:
            self._effect(self.done + 1, *self.held.pop(self.done + 1), now)
        self.held_since = now if self.held else 0

    def _effect(self, seq: int, kind: str, fields: tuple[object, ...], now: int) -> None:
        self.done = seq
        current = self.current()
        if kind == "edit":
            if seq > self.shown and not self.gap:
                self._edit(*fields)  # type: ignore[arg-type]
        elif kind == "pin" and current is not None:
            span, ttl = fields
            self._pin(current.tip, span, ttl, now)  # type: ignore[arg-type]
        elif kind == "unpin" and current is not None:
            self._unpin(current.tip, *fields)  # type: ignore[arg-type]
        elif kind == "unpin":
            # No list is left but what pins hold: the one that ends where the span does.
            ((start, end),) = fields  # type: ignore[misc]
            if 0 <= start < end:
                self.pins = [p for p in self.pins if p.tip.messages()[end - 1 :] != [p.tip]]
        elif kind == "wait":
            (self.wait,) = fields  # type: ignore[assignment]
            self.active = now
        elif kind == "close":
            self.close()

    def _edit(self, start: int, end: int, num_new: int) -> None:
        current = self.current()
        messages = current.tip.messages() if current else self.calls[-1].tip.messages() if self.calls else []
        if not messages or (start == end and num_new == 0):
            return
        gone = messages[start] if start < len(messages) else None

        def cut(node: Node) -> Node:
            return gone.parent if gone and gone in node.path() and gone.parent else node

        for pin in list(self.pins):
            if pin.moving or gone in pin.tip.path():
                if start <= pin.index < end:
                    self.pins.remove(pin)
                elif pin.index >= end:
                    pin.tip, pin.moving = cut(pin.tip), True
                    pin.index += num_new - (end - start)
        self.lines = [x for x in self.lines if x is current or gone not in x.tip.path()]
        if current is not None:
            current.tip = cut(current.tip)
            current.closed = cut(current.closed) if current.closed else None
            if start <= len(messages):
                current.answers = []
        for call in self.calls:
            if gone in call.tip.path():
                call.cut = cut(call.cut) if call.cut else cut(call.tip)
                call.stale = True

    def _pin(self, tip: Node, span: tuple[int, int], ttl: int, now: int) -> None:
        messages = tip.messages()
        if not 0 <= span[0] < span[1] <= len(messages):
            return
        node = messages[span[1] - 1]
        if node.tokens is None:
            return
        known = next((p for p in self.pins if p.tip is node and not p.moving), None)
        if known is None:
            known = Hold(node, 0)
            self.pins.append(known)
        known.word, known.index = node.word, len(node.messages()) - 1
        known.until = max(known.until, now + ttl)

    def _unpin(self, tip: Node, span: tuple[int, int]) -> None:
        messages = tip.messages()
        if not 0 <= span[0] < span[1] <= len(messages):
            return
        node = messages[span[1] - 1]
        self.pins = [
            p
            for p in self.pins
            if not ((p.word, p.index) == (node.word, span[1] - 1) if p.moving else p.tip is node)
        ]

    def _follow(self, tip: Node) -> None:
        open_paths = {n for x in self.lines if x.doubted is None for n in x.tip.path()}
        for pin in self.pins:
            if pin.tip in open_paths and not pin.moving:
                continue
            same = [(abs(i - pin.index), i, n) for i, n in enumerate(tip.messages()) if n.word == pin.word]
            if same:
                _, index, node = min(same, key=lambda x: x[:2])
                if node.tokens is not None:
                    pin.tip, pin.index, pin.moving = node, index, False

    # -- time ---------------------------------------------------------------------------------------------

    def tick(self, now: int) -> None:
        self.pins = [p for p in self.pins if p.until > now]
        if self.held and now - self.held_since > 5 * SECOND:
            self.gap = True
            self.done = max(self.held)
            self.held, self.held_since = {}, 0
        if not self.gap:
            self.lines = [x for x in self.lines if x.doubted is None or now - x.doubted < 60 * SECOND]
        lease = 3600 if self.gap else LEASES[self.wait]
        if self.open and not self.calls and now - self.active >= lease * SECOND:
            self.close()
