"""CrewAI: an interceptor of the LLM that names contexts and tells edits, with hooks for waits and ends."""

import json
from contextvars import ContextVar
from typing import Any

from kvtether import http
from kvtether.agent_contexts import AgentContexts
from kvtether.context import Context, current

try:
    from crewai.events import AgentExecutionCompletedEvent, AgentExecutionErrorEvent, crewai_event_bus
    from crewai.hooks import (
        register_after_tool_call_hook,
        register_before_llm_call_hook,
        register_before_tool_call_hook,
    )
    from crewai.llms.hooks import BaseInterceptor
except ImportError as missing:
    raise ImportError("kvtether.adapters.crewai needs it: pip install crewai") from missing

_caller: ContextVar[Context | None] = ContextVar("kvtether_caller", default=None)
_asked: ContextVar[list[Any] | None] = ContextVar("kvtether_asked", default=None)


class KVTether(BaseInterceptor[Any, Any]):
    """`LLM(..., interceptor=KVTether())`; one instance serves every LLM of a process, before crews are made.

    A context is a task's execution by its agent, and ends with it; a task that is delegated is a subagent's.
    What is asked outside of an execution (summaries, plans, memory, guardrails) is a one-off.
    """

    def __init__(self, flow: str = "") -> None:
        self.contexts, self._send = AgentContexts(flow=flow), http.hooks()["request"][0]
        register_before_llm_call_hook(self._asks)
        register_before_tool_call_hook(self._calls)
        register_after_tool_call_hook(lambda call: _caller.set(None))
        crewai_event_bus.on(AgentExecutionCompletedEvent)(self._ended)
        crewai_event_bus.on(AgentExecutionErrorEvent)(self._ended)

    def on_outbound(self, message: Any) -> Any:
        """Say whose call it is and what became of its list."""
        body, asked, context = json.loads(message.content), _asked.get(), current()
        sent = body.get("messages") or body.get("input")
        if context is not None and isinstance(sent, list):
            if asked and sent[0].get("content") != asked[0].get("content"):  # a summary, asked amid a call
                context = self.contexts.one_off(context.agent)
            context.messages.sync(sent)
            with context.active():
                self._send(message)
        return message

    def on_inbound(self, message: Any) -> Any:
        """Learn whether the proxy is there."""
        if (context := current()) is not None:
            context.client.saw(f"{context.client.origin}/", message.headers)
        return message

    async def aon_outbound(self, message: Any) -> Any:
        """The same."""
        return self.on_outbound(message)

    async def aon_inbound(self, message: Any) -> Any:
        """The same."""
        return self.on_inbound(message)

    def _asks(self, call: Any) -> None:
        role = getattr(call.agent, "role", "")
        work = call.executor and (call.task or call.agent)
        one = self.contexts.beside(_caller.get(), role, str(work.id)) if work else self.contexts.one_off(role)
        _asked.set(call.messages if work else None)
        one.activate()

    def _calls(self, call: Any) -> None:
        if work := call.task or call.agent:
            _caller.set(self.contexts.named(str(work.id)))
            self.contexts.named(str(work.id)).waiting("tool", tool=call.tool_name)

    def _ended(self, source: Any, event: Any) -> None:
        self.contexts.close(str(event.task.id))
