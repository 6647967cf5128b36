"""A workload of coding agents, made up: for machines where no recorded trace lies.

Every session is one agent that reads, edits and tests by tools. Its list begins with tool definitions and a
system prompt that its kind of agent shares, grows by a tool result a turn, is compacted when it has become
long (a one-off summarises a fork of it, then the summary takes the turns' place), and is at times rewritten
at its end. Some turns hand a question to a sub-agent, which begins with the parent's list or with one of its
own, makes a few calls and closes.
"""

import random
from collections.abc import Iterator

import msgspec

from engine_bridge.sim.traces.calls import Call, Role
from engine_bridge.sim.traces.reader import Decoder, Record

_TOOLS = {"read": 0.3, "edit": 0.5, "search": 1.5, "bash": 8.0, "test": 25.0}
"""Median seconds that a tool takes."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is made. Lengths in tokens, those of results and answers are medians of log-normal draws;
    `_share` values are probabilities by turn."""

    seed: int = 0
    num_sessions: int = 8
    num_turns: int = 24
    num_kinds: int = 2
    tools_tokens: int = 1800
    system_tokens: int = 900
    task_tokens: int = 250
    result_tokens: int = 350
    answer_tokens: int = 80
    compaction_tokens: int = 12_000
    rewrite_share: float = 0.05
    human_share: float = 0.06
    fork_share: float = 0.04
    spawn_share: float = 0.05
    sub_agent_turns: int = 4


def generated(workload: Workload) -> Iterator[Call]:
    """The calls of a workload, equal for equal workloads."""
    return map(Decoder().call, generated_records(workload))


def generated_records(workload: Workload) -> Iterator[Record]:
    """The same as the lines of a trace file have it."""
    for session in range(workload.num_sessions):
        yield from _Agent(workload, session).records()


class _Agent:
    """One session. Lists are held as messages `(id, role, tokens)`, answers included."""

    def __init__(self, workload: Workload, session: int) -> None:
        self.workload = workload
        self.session = session
        self.random = random.Random(f"{workload.seed}:{session}")
        self.now = 0.0
        self.num_calls = 0
        self.num_messages = 0
        self.num_contexts = 1
        self.lists: dict[int, list[tuple[str, Role, int]]] = {}
        self.last: dict[int, int] = {}
        self.ended: dict[int, tuple[float, str]] = {}

    def records(self) -> Iterator[Record]:
        kind = self.session % self.workload.num_kinds
        head = [
            (f"tools-{kind}", Role.TOOL, self.workload.tools_tokens),
            (f"system-{kind}", Role.SYSTEM, self.workload.system_tokens),
        ]
        task = self._message(Role.USER, self.workload.task_tokens)
        yield self._first(0, -1, ("create",), [*head, task])
        for turn in range(1, self.workload.num_turns):
            last = turn == self.workload.num_turns - 1
            num_tokens = sum(tokens for _, _, tokens in self.lists[0])
            if num_tokens > self.workload.compaction_tokens and not last:
                yield from self._compaction(len(head))
                continue
            draw = self.random.random() - self.workload.fork_share
            if draw < 0:
                yield from self._sub_agent(forked=True)
            elif draw < self.workload.spawn_share:
                yield from self._sub_agent(forked=False)
            rewrites = self.random.random() < self.workload.rewrite_share
            keep = len(self.lists[0]) - (1 if rewrites else 0)
            yield self._next(0, keep, self._result(), closes=last)

    def _compaction(self, keep: int) -> Iterator[Record]:
        child = self._new_context()
        ask = self._message(Role.USER, 120)
        mine = self.lists[0]
        yield self._first(child, 0, ("fork", 0, len(mine)), [*mine, ask], one_off=True, closes=True)
        _, _, num_tokens = self.lists[child][-1]
        yield self._next(0, keep, self._message(Role.USER, 4 * num_tokens))

    def _sub_agent(self, forked: bool) -> Iterator[Record]:
        child = self._new_context()
        task = self._message(Role.USER, self.workload.task_tokens)
        mine = self.lists[0]
        if forked:
            yield self._first(child, 0, ("fork", 0, len(mine)), [*mine, task])
        else:
            head = self._message(Role.SYSTEM, self.workload.system_tokens // 2)
            yield self._first(child, 0, ("create",), [head, task])
        for turn in range(self.workload.sub_agent_turns):
            last = turn == self.workload.sub_agent_turns - 1
            yield self._next(child, len(self.lists[child]), self._result(), closes=last)

    def _new_context(self) -> int:
        self.num_contexts += 1
        return self.num_contexts - 1

    def _result(self) -> tuple[str, Role, int]:
        return self._message(Role.TOOL, self._drawn(self.workload.result_tokens))

    def _message(self, role: Role, num_tokens: int) -> tuple[str, Role, int]:
        self.num_messages += 1
        return f"{self.session}.{self.num_messages}", role, num_tokens

    def _drawn(self, median: int) -> int:
        return max(int(self.random.lognormvariate(0.0, 1.0) * median), 1)

    def _first(
        self,
        context: int,
        parent: int,
        begins: tuple[str | int, ...],
        messages: list[tuple[str, Role, int]],
        *,
        one_off: bool = False,
        closes: bool = False,
    ) -> Record:
        pre = (begins, ("one_off",)) if one_off else (begins,)
        base, keep = (self.last[parent], int(begins[2])) if begins[0] == "fork" else (-1, 0)
        return self._record(context, parent, base, keep, messages, pre, closes)

    def _next(
        self, context: int, keep: int, message: tuple[str, Role, int], *, closes: bool = False
    ) -> Record:
        old = self.lists[context]
        pre: tuple[tuple[str | int, ...], ...] = (("append", 1),)
        if lost := old[keep:]:
            pre = (("replace", keep, len(lost), sum(tokens for _, _, tokens in lost)), *pre)
        messages = [*old[:keep], message]
        return self._record(context, self._parent(context), self.last[context], keep, messages, pre, closes)

    def _parent(self, context: int) -> int:
        return 0 if context else -1

    def _record(
        self,
        context: int,
        parent: int,
        base: int,
        keep: int,
        messages: list[tuple[str, Role, int]],
        pre: tuple[tuple[str | int, ...], ...],
        closes: bool,
    ) -> Record:
        gap: float | None = None
        gap_kind = ""
        if context in self.ended:
            ended, gap_kind = self.ended[context]
            gap = self.now - ended
        answer = self._message(Role.ASSISTANT, self._drawn(self.workload.answer_tokens))
        human = context == 0 and self.random.random() < self.workload.human_share
        tool = self.random.choice(list(_TOOLS))
        at, service = self.now, 0.3 + answer[2] * 0.02
        pause = self.random.lognormvariate(0.0, 1.0) * (60.0 if human else _TOOLS[tool])
        self.now = at + service + pause
        waits = "end" if closes else "human" if human else "tool"
        self.ended[context] = (at + service, waits)
        self.lists[context] = [*messages, answer]
        self.last[context] = self.num_calls
        self.num_calls += 1
        return Record(
            s=self.session,
            i=self.num_calls - 1,
            c=context,
            pc=parent,
            t=at,
            dur=service,
            gap=gap,
            gk=gap_kind,
            wait=waits,
            tool=(tool,) if waits == "tool" else (),
            base=base,
            keep=keep,
            new=tuple(messages[keep:]),
            num_tokens=sum(tokens for _, _, tokens in messages),
            out=(answer[0], answer[2]),
            ot=answer[2],
            pre=pre,
            post=(("close",),) if closes else (),
            ck=1 if closes else 0,
        )
