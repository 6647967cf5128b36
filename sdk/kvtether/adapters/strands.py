"""Strands Agents: hooks that give each agent a context, and a model that tells the list as it is sent.

The hooks alone say who calls and what is waited for; the model tells every edit of a conversation manager and
names its summaries one-offs. Both are needed, and one `KVTetherHooks` serves any number of agents.
"""

import weakref
from contextvars import ContextVar
from functools import partial
from typing import Any

from kvtether.context import Context

try:
    from strands import Agent
    from strands.hooks import (
        AfterInvocationEvent,
        AfterModelCallEvent,
        BeforeInvocationEvent,
        BeforeModelCallEvent,
        BeforeToolCallEvent,
        HookProvider,
        HookRegistry,
    )
    from strands.models.openai import OpenAIModel
except ImportError as missing:
    raise ImportError(
        "kvtether.adapters.strands needs Strands Agents 1.x: pip install 'strands-agents[openai]'"
    ) from missing

_acting: ContextVar[tuple[Context, bool] | None] = ContextVar("kvtether_strands", default=None)
"""Whose agent acts in this task, and whether the request that the model makes now is its turn."""


class KVTetherHooks(HookProvider):
    """`Agent(hooks=[…])`. A context lives as long as its agent object; that of an agent inside a tool is a
    child of the caller's."""

    def __init__(self) -> None:
        self._contexts: weakref.WeakKeyDictionary[Agent, Context] = weakref.WeakKeyDictionary()

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        for kind in (BeforeInvocationEvent, BeforeModelCallEvent, AfterModelCallEvent, BeforeToolCallEvent):
            registry.add_callback(kind, partial(self._acts, kind is BeforeModelCallEvent))
        registry.add_callback(BeforeToolCallEvent, self._before_tool)
        registry.add_callback(AfterInvocationEvent, self._after_invocation)

    def context(self, agent: Agent) -> Context:
        """The context of an agent."""
        if agent not in self._contexts:
            caller = _acting.get()
            self._contexts[agent] = (caller[0].spawn if caller else Context)(agent=agent.name)
            weakref.finalize(agent, self._contexts[agent].close)
        return self._contexts[agent]

    def close(self) -> None:
        """The agents that used these hooks have done their work."""
        for context in self._contexts.values():
            context.close()

    def _acts(self, turn: bool, event: Any) -> None:
        _acting.set((self.context(event.agent), turn))

    def _before_tool(self, event: BeforeToolCallEvent) -> None:
        delegates = hasattr(event.selected_tool, "agent")
        self.context(event.agent).waiting("subagent" if delegates else "tool", event.tool_use["name"])

    def _after_invocation(self, event: AfterInvocationEvent) -> None:
        self.context(event.agent).waiting("human")
        _acting.set(None)


class KVTetherModel(OpenAIModel):
    """`OpenAIModel` for agents with `KVTetherHooks`."""

    def format_request(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        request = super().format_request(*args, **kwargs)
        if not request["tools"]:
            del request["tools"]  # vLLM takes a list with entries or none, and summaries have no tools
        if acting := _acting.get():
            context = acting[0] if acting[1] else acting[0].one_off()
            context.messages.sync(request["messages"])
            for key, value in context.call().items():
                request[key] = {**(request.get(key) or {}), **(value or {})}
        return request
