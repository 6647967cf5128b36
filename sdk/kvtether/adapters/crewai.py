"""CrewAI: an interceptor of the LLM that names contexts and tells edits, with hooks for waits and ends."""

import json
from contextvars import ContextVar
from typing import Any

from kvtether import http
from kvtether.agent_contexts import AgentContexts
from kvtether.context import Context, current

try:
    from crewai.events import AgentExecutionCompletedEvent, crewai_event_bus
    from crewai.hooks import (
        register_after_tool_call_hook,
        register_before_llm_call_hook,
        register_before_tool_call_hook,
    )
    from crewai.llms.hooks import BaseInterceptor
except ImportError as missing:
    raise ImportError("kvtether.adapters.crewai needs it: pip install crewai") from missing

_caller: ContextVar[Context | None] = ContextVar("kvtether_caller", default=None)
_sent: ContextVar[Any] = ContextVar("kvtether_sent", default=None)


class KVTether(BaseInterceptor[Any, Any]):
    """`LLM(..., interceptor=KVTether())`; one instance serves every LLM of a process, before crews are made.

    A context is a task's execution by its agent, and ends with it; a task that is delegated is a subagent's.
    What is asked outside of an execution (summaries, plans, memory, guardrails) is a one-off.
    """

    def __init__(self, flow: str = "") -> None:
        self.contexts = AgentContexts(flow=flow)
        self._before, self._after = http.hooks()["request"][0], http.hooks()["response"][0]
        register_before_llm_call_hook(self._asks)
        register_before_tool_call_hook(self._calls)
        register_after_tool_call_hook(lambda call: _caller.set(None))
        crewai_event_bus.on(AgentExecutionCompletedEvent)(self._ended)

    def on_outbound(self, message: Any) -> Any:
        """Say whose call it is and what became of its list."""
        context = current()
        if context is not None:
            context.messages.sync(json.loads(message.content).get("messages", ()))
        self._before(message)
        _sent.set(message)
        return message

    def on_inbound(self, message: Any) -> Any:
        """Learn whether the proxy is there."""
        message.request = _sent.get()
        self._after(message)
        return message

    async def aon_outbound(self, message: Any) -> Any:
        """The same."""
        return self.on_outbound(message)

    async def aon_inbound(self, message: Any) -> Any:
        """The same."""
        return self.on_inbound(message)

    def _asks(self, call: Any) -> None:
        work, caller, role = (
            call.executor and (call.task or call.agent),
            _caller.get(),
            getattr(call.agent, "role", ""),
        )
        if not work:
            context = Context(agent=role, flow=self.contexts.flow)
            context.is_one_off = True
        elif caller is not None and caller.name != str(work.id):
            context = self.contexts.beside(caller, role, name=str(work.id))
        else:
            context = self.contexts.named(str(work.id))
            context.agent = context.agent or role
        context.activate()

    def _calls(self, call: Any) -> None:
        _caller.set(
            self.contexts.named(str((call.task or call.agent).id)) if call.task or call.agent else None
        )
        if (caller := _caller.get()) is not None:
            caller.waiting("tool", tool=call.tool_name)

    def _ended(self, source: Any, event: Any) -> None:
        self.contexts.close(str(event.task.id))
