"""The contexts of a harness's agents: which one a run goes on with, and what ends when a tool returns."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvtether.arguments import WaitKind
from kvtether.client import Client
from kvtether.context import Context, current
from kvtether.names import context_id, label

MAX_CONTEXTS = 1024
"""Contexts that are remembered, the latest ones. Of another the next call's list alone tells the edits."""

_tool: ContextVar["_ToolCall | None"] = ContextVar("kvtether_tool", default=None)
_conversation: ContextVar[Context | None] = ContextVar("kvtether_conversation", default=None)


def conversation() -> Context | None:
    """The context of the conversation that this thread or task works in; see `AgentContexts.within`."""
    return _conversation.get()


def waiting(kind: WaitKind, tool: str = "") -> None:
    """Tell what the active context waits for, if there is one."""
    context = current()
    if context is not None:
        context.waiting(kind, tool=tool)


class _ToolCall:
    """A tool call that is under way in this thread or task, and the contexts that began inside it."""

    def __init__(self, caller: Context, call_id: str) -> None:
        self.caller = caller
        self.call_id = call_id
        self.children: list[Context] = []


class AgentContexts:
    """Contexts by name, for an adapter. Agents that run inside a tool are subagents of whoever called it,
    wherever their adapter sits: each has a context of its own, which ends with the tool. Thread-safe."""

    def __init__(self, agent: str = "", flow: str = "", client: Client | None = None) -> None:
        """Labels of the contexts that begin here, and where they are told."""
        self.agent = agent
        self.flow = flow
        self.client = client
        self._lock = threading.Lock()
        self._known: dict[str, Context] = {}

    def named(self, name: str | None) -> Context:
        """The context of that name, begun if it is not known; without a name a new one."""
        with self._lock:
            found = self._known.pop(name, None) if name else None
            return self._keep(found or Context(name, agent=self.agent, flow=self.flow, client=self.client))

    def begin(self, name: str | None = None, *, agent: str = "", inherits: str | None = None) -> Context:
        """The context of a run that begins now.

        Inside a tool a child of the caller's: a fork of it if the run `inherits` the list of the context of
        that name, else a spawn. Otherwise the context that is active here, else the one named.
        """
        call = _tool.get()
        if call is None:
            active = current()
            if active is not None:
                return self.adopt(active)
            found = self.named(name)
            found.agent = found.agent or label(agent)
            return found
        begin = call.caller.fork if inherits == call.caller.name else call.caller.spawn
        number = f".{len(call.children)}" if call.children else ""
        child = begin(name=f"{call.caller.name}:{call.call_id}{number}")
        child.agent = label(agent or self.agent)
        call.caller.waiting("subagent")
        call.children.append(child)
        return self.adopt(child)

    def adopt(self, context: Context) -> Context:
        """Know a context that began elsewhere by its name."""
        with self._lock:
            self._known.pop(context.name, None)
            return self._keep(context)

    @contextmanager
    def conversation(self, name: str | None) -> Iterator[Context]:
        """What happens inside goes on with the conversation of that name."""
        with self.within(self.named(name)) as context:
            yield context

    @contextmanager
    def within(self, context: Context) -> Iterator[Context]:
        """What happens inside belongs to the conversation of `context`, which is also the active one."""
        reset = _conversation.set(self.adopt(context))
        try:
            with context.active():
                yield context
        finally:
            _conversation.reset(reset)

    def beside(self, root: Context | None, agent: str, name: str = "") -> Context:
        """The context of an agent that `root` handed its conversation or some work to: its own list of it.

        Without a root, or where `name` is the root's, the context of that name, labelled with the agent.
        """
        name = context_id(name or f"{root.name if root else 'agent'}:{agent}")
        if root is None or root.name == name:
            found = self.named(name)
            found.agent = found.agent or label(agent)
            return found
        with self._lock:
            known = self._known.pop(name, None)
            if known is None:
                root.waiting("subagent")
            return self._keep(known or root.spawn(name=name, agent=agent))

    def one_off(self, agent: str = "") -> Context:
        """A context for a single call that nobody's list has part in."""
        once = Context(agent=agent or self.agent, flow=self.flow, client=self.client)
        once.is_one_off = True
        return once

    def over(self, name: str, *, goes_on: bool) -> None:
        """A run has ended. Its context waits for the user if the conversation `goes_on`, else it ends, unless
        it is another's to end: a tool's, or that of whoever made it active."""
        if _tool.get() is not None:
            return
        if goes_on or current() is not None:
            self.named(name).waiting("human")
        else:
            self.close(name)

    def close(self, name: str) -> None:
        """The conversation is over: deleted, or nobody will go on with it. So is what worked for it."""
        with self._lock:
            helpers = [each.name for each in self._known.values() if each.parent == name]
        for each in helpers:
            self.close(each)
        self.named(name).close()
        with self._lock:
            self._known.pop(name, None)

    @contextmanager
    def tool(
        self, caller: Context | None, tool: str, call_id: str, pauses: tuple[type[BaseException], ...] = ()
    ) -> Iterator[None]:
        """A tool runs for `caller`, and inside it perhaps other agents. An error of `pauses` means that the
        tool will go on when a human has answered, and its agents with it."""
        if caller is None:
            yield
            return
        call = _ToolCall(caller, call_id)
        caller.waiting("tool", tool=tool)
        reset = _tool.set(call)
        try:
            yield
        except pauses:
            call.children.clear()
            caller.waiting("human")
            raise
        finally:
            _tool.reset(reset)
            for child in call.children:
                self.close(child.name)

    @contextmanager
    def subagent(self, caller: Context | None, tool: str, call_id: str) -> Iterator[None]:
        """A tool that is an agent runs for `caller`: all inside belongs to a context of its own."""
        with self.tool(caller, tool, call_id), self.within(self.begin()):
            yield

    def _keep(self, context: Context) -> Context:
        self._known[context.name] = context
        while len(self._known) > MAX_CONTEXTS:
            del self._known[next(iter(self._known))]
        return context
