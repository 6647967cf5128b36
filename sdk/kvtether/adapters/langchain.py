"""LangChain, LangGraph and deepagents: middleware that names contexts, tells edits and follows subagents.

Put it last among an agent's middleware, so that it sees the list that is sent, and give it to subagents too.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any, NotRequired

from kvtether.agent_contexts import AgentContexts

try:
    from langchain.agents.middleware import AgentMiddleware, AgentState, ModelRequest
    from langchain.agents.middleware.types import PrivateStateAttr
    from langgraph.config import get_config
    from langgraph.errors import GraphInterrupt
except ImportError as missing:
    raise ImportError("kvtether.adapters.langchain needs LangChain 1.x: pip install langchain") from missing


class KVTetherState(AgentState[Any]):
    """An agent's state with its context's name, which a checkpointer keeps with the thread."""

    kvtether: NotRequired[Annotated[str, PrivateStateAttr]]  # type: ignore[valid-type]


class KVTether(AgentMiddleware[KVTetherState, Any, Any]):
    """Middleware for `create_agent` and `create_deep_agent`; one instance serves any number of agents.

    A context is the one that is active around the run, else the thread, else the run, with which it ends.
    An agent inside a tool has a context of its own, which ends with the tool. `contexts.close(thread_id)`
    says that a thread is over.
    """

    state_schema = KVTetherState

    def __init__(self, agent: str = "", flow: str = "") -> None:
        self.contexts = AgentContexts(agent, flow)

    def before_agent(self, state: KVTetherState, runtime: Any) -> dict[str, Any]:
        """Find or begin the context of a run."""
        known = state.get("kvtether")
        return {"kvtether": self.contexts.begin(known or _thread(), inherits=known).name}

    def after_agent(self, state: KVTetherState, runtime: Any) -> None:
        """A run is over."""
        self.contexts.over(state["kvtether"], goes_on=_thread() is not None)

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[..., Any]) -> Any:
        """Say whose call it is and what became of its list."""
        return handler(self._told(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[..., Awaitable[Any]]
    ) -> Any:
        """The same."""
        return await handler(self._told(request))

    def wrap_tool_call(self, request: Any, handler: Callable[[Any], Any]) -> Any:
        """Say what is waited for, and by whom agents inside were called."""
        with self._calling(request):
            return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """The same."""
        with self._calling(request):
            return await handler(request)

    def _told(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        context, model = self.contexts.named(request.state.get("kvtether")), request.model
        if not hasattr(model, "default_headers"):  # a client that takes no headers
            return request
        if not getattr(model, "use_responses_api", True):  # each message is one on the wire
            system = [request.system_message] if request.system_message else []
            context.messages.sync([*system, *request.messages])
        settings, call = dict(request.model_settings), context.call()
        settings["extra_headers"] = {**(settings.get("extra_headers") or {}), **call["extra_headers"]}
        body = settings.get("extra_body") or getattr(model, "extra_body", None)
        settings["extra_body"] = {**(body or {}), **(call["extra_body"] or {})} or None
        return request.override(model_settings=settings)

    def _calling(self, request: Any) -> AbstractContextManager[None]:
        caller, call = self.contexts.named(request.state.get("kvtether")), request.tool_call
        return self.contexts.tool(caller, call["name"], call["id"], pauses=(GraphInterrupt,))


def _thread() -> str | None:
    return get_config().get("configurable", {}).get("thread_id")
