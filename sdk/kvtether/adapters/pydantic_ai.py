"""Pydantic AI: a capability that names contexts, tells edits and follows agents that are called by tools."""

from dataclasses import replace
from typing import Any

from kvtether.agent_contexts import AgentContexts

try:
    from pydantic_ai import RunContext
    from pydantic_ai.capabilities import AbstractCapability, CapabilityOrdering
    from pydantic_ai.messages import SystemPromptPart
    from pydantic_ai.models import ModelRequestContext
    from pydantic_ai.models.openai import OpenAIChatModel
except ImportError as missing:
    raise ImportError(
        "kvtether.adapters.pydantic_ai needs it: pip install 'pydantic-ai-slim[openai]'"
    ) from missing


class KVTether(AbstractCapability[Any]):
    """`Agent(..., capabilities=[KVTether()])`; one instance serves any number of agents.

    A context is the one that is active around the run, else the conversation (`conversation_id`, which goes
    on with `message_history`). An agent that runs inside a tool has a context of its own, which ends with the
    tool. `contexts.close(conversation_id)` says that a conversation is over.
    """

    def __init__(self, flow: str = "") -> None:
        self.contexts, self._runs = AgentContexts(flow=flow), dict[str, str]()

    def get_ordering(self) -> CapabilityOrdering:
        """Innermost, to see the messages that are sent."""
        return CapabilityOrdering(position="innermost")

    async def wrap_run(self, ctx: RunContext[Any], *, handler: Any) -> Any:
        """Find or begin the context of a run."""
        context = self.contexts.begin(ctx.conversation_id, agent=ctx.agent.name or "")
        self._runs[ctx.run_id] = context.name
        try:
            return await handler()
        finally:
            self.contexts.over(self._runs.pop(ctx.run_id), goes_on=True)

    async def prepare_model_request(self, ctx: RunContext[Any], request_context: ModelRequestContext) -> Any:
        """Say whose call it is and what became of its list."""
        context = self.contexts.named(self._runs[ctx.run_id])
        if isinstance(getattr(request_context.model, "wrapped", request_context.model), OpenAIChatModel):
            context.messages.sync(_wire(request_context))
        settings, call = dict(request_context.model_settings or {}), context.call()
        settings["extra_headers"] = {**settings.get("extra_headers", {}), **call["extra_headers"]}
        if call["extra_body"]:
            settings["extra_body"] = {**settings.get("extra_body", {}), **call["extra_body"]}
        return replace(request_context, model_settings=settings)

    async def wrap_tool_execute(self, ctx: Any, *, call: Any, tool_def: Any, args: Any, handler: Any) -> Any:
        """Say what is waited for, and by whom agents inside were called."""
        with self.contexts.tool(
            self.contexts.named(self._runs[ctx.run_id]), call.tool_name, call.tool_call_id
        ):
            return await handler(args)


def _wire(request: ModelRequestContext) -> list[Any]:
    """The list as a chat request has it: parts are messages, instructions stand behind system prompts."""
    sent = [part for each in request.messages for part in (each.parts if each.kind == "request" else [each])]
    lead = next((n for n, part in enumerate(sent) if not isinstance(part, SystemPromptPart)), len(sent))
    return [*sent[:lead], *(request.model_request_parameters.instruction_parts or ()), *sent[lead:]]
