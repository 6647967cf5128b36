"""OpenHands SDK: an LLM that gives each conversation a context and tells its list as it is sent.

A condensation is the edit that it makes; the condenser's own calls, titles and the like are one-offs.
Subagents are given copies of the LLM by OpenHands itself, and are children of whoever called them.
"""

from contextvars import ContextVar
from typing import Any

from kvtether.context import Context

try:
    from openhands.sdk import LLM
except ImportError as missing:
    raise ImportError(
        "kvtether.adapters.openhands needs the OpenHands SDK 1.x: pip install openhands-sdk"
    ) from missing

_contexts: dict[str, Context] = {}
_acting: ContextVar[Context | None] = ContextVar("kvtether_openhands", default=None)
"""Whose tools run in this thread."""


class KVTetherLLM(LLM):
    """`LLM` for an agent and its condenser."""

    def generate(self, messages: Any, tools: Any = None, *args: Any, **kwargs: Any) -> Any:
        context = self._told(messages, tools, kwargs)
        return self._heard(context, super().generate(messages, tools, *args, **kwargs))

    async def agenerate(self, messages: Any, tools: Any = None, *args: Any, **kwargs: Any) -> Any:
        context = self._told(messages, tools, kwargs)
        return self._heard(context, await super().agenerate(messages, tools, *args, **kwargs))

    def _told(self, messages: Any, tools: Any, kwargs: dict[str, Any]) -> Context:
        whose, acting = kwargs.get("call_context"), _acting.get()
        if whose and whose.session_id and tools:
            made = (acting.spawn if acting else Context)(agent="openhands")
            context = _contexts.setdefault(whose.session_id, made)
            context.messages.sync(self._wire(messages))
        else:
            context = (acting or Context(agent="openhands")).one_off()
        told = context.call()
        kwargs["extra_headers"] = {**(self.extra_headers or {}), **told["extra_headers"]}
        kwargs["extra_body"] = told["extra_body"] or {}
        return context

    def _wire(self, messages: Any) -> list[Any]:
        if self.uses_responses_api():
            return list(self.format_messages_for_responses(messages)[1])
        return list(self.format_messages_for_llm(messages))

    def _heard(self, context: Context, answer: Any) -> Any:
        called = [call.name for call in answer.message.tool_calls or ()]
        if not context.is_one_off:
            _acting.set(context if called and called[0] != "finish" else None)
            kind: Any = "subagent" if called[:1] in (["task"], ["delegate"]) else "tool"
            context.waiting(kind if _acting.get() else "human", *called[:1])
        return answer


def end(conversation_id: Any) -> None:
    """A conversation was closed, and with it those of its subagents."""
    if context := _contexts.pop(str(conversation_id), None):
        context.close()
        for key in [key for key, other in _contexts.items() if other.parent == context.name]:
            end(key)
