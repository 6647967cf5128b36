"""Google ADK: a plugin that gives each agent of a session a context, and a LiteLLM model that tells the list.

Both are needed: the plugin knows who calls, the model has the list as it is sent.
"""

import weakref
from contextvars import ContextVar
from typing import Any

from kvtether.context import Context

try:
    from google.adk.models.lite_llm import LiteLlm, LiteLLMClient
    from google.adk.plugins.base_plugin import BasePlugin
    from google.adk.tools.agent_tool import AgentTool
    from google.genai.types import HttpOptions
    from pydantic import Field
except ImportError as missing:
    raise ImportError(
        "kvtether.adapters.google_adk needs ADK 2.x with LiteLLM: pip install google-adk litellm"
    ) from missing

_OWNER = "x-kvtether-owner"
_known: weakref.WeakValueDictionary[str, Context] = weakref.WeakValueDictionary()
_caller: ContextVar[Context | None] = ContextVar("kvtether_google_adk", default=None)
"""In the task of a tool that is an agent: who called it."""


class KVTetherPlugin(BasePlugin):
    """`App(plugins=[…])`. A context is an agent in a session and branch; `runner.close()` ends them all."""

    def __init__(self, name: str = "kvtether") -> None:
        super().__init__(name=name)
        self._contexts: dict[tuple[str, str, str | None], Context] = {}

    def context(self, run: Any) -> Context:
        """The context of an `InvocationContext`."""
        key = (run.session.id, run.agent.name, run.branch)
        if key not in self._contexts:
            caller = _caller.get()
            made = (caller.spawn if caller else Context)(agent=run.agent.name)
            self._contexts[key] = _known[made.name] = made
        return self._contexts[key]

    async def before_model_callback(self, *, callback_context: Any, llm_request: Any) -> None:
        options = llm_request.config.http_options = llm_request.config.http_options or HttpOptions()
        owner = self.context(callback_context.get_invocation_context()).name
        options.headers = {**(options.headers or {}), _OWNER: owner}

    async def before_tool_callback(self, *, tool: Any, tool_args: Any, tool_context: Any) -> None:
        context = self.context(tool_context.get_invocation_context())
        _caller.set(context if isinstance(tool, AgentTool) else None)
        context.waiting("subagent" if _caller.get() else "tool", tool.name)

    async def after_run_callback(self, *, invocation_context: Any) -> None:
        self.context(invocation_context).waiting("human")
        session = invocation_context.session.id
        for key in [key for key, context in self._contexts.items() if key[0] == session and context.parent]:
            self._contexts.pop(key).close()

    async def close(self) -> None:
        while self._contexts:
            self._contexts.popitem()[1].close()


class _Client(LiteLLMClient):
    async def acompletion(self, model: Any, messages: Any, tools: Any, **kwargs: Any) -> Any:
        headers = kwargs["extra_headers"] = dict(kwargs.get("extra_headers") or {})
        context = _known.get(headers.pop(_OWNER, "")) or Context(agent="summary").one_off()
        context.messages.sync([dict(message) for message in messages])
        for key, value in context.call().items():
            kwargs[key] = {**(kwargs.get(key) or {}), **(value or {})}
        return await super().acompletion(model, messages, tools, **kwargs)


class KVTetherLiteLlm(LiteLlm):
    """`LiteLlm` for agents of an app with `KVTetherPlugin`; what else asks it, a summariser, is a one-off."""

    llm_client: LiteLLMClient = Field(default_factory=_Client, exclude=True)
