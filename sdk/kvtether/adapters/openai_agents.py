"""The OpenAI Agents SDK: an input filter that names contexts and tells edits, and hooks that tell waits.

The client needs the hooks of `kvtether.http`: by them what is found out here travels on the calls.
"""

from typing import Any

from kvtether.agent_contexts import AgentContexts, conversation, waiting
from kvtether.context import Context, current

try:
    from agents import FunctionTool, RunHooks
    from agents.models.chatcmpl_converter import Converter
    from agents.run import CallModelData, ModelInputData
except ImportError as missing:
    raise ImportError("kvtether.adapters.openai_agents needs it: pip install openai-agents") from missing


class KVTether(RunHooks[Any]):
    """Run inside `with tether.contexts.conversation(name):` with `hooks=tether` and
    `RunConfig(call_model_input_filter=tether.told)`. `tether.contexts.close(name)` ends the conversation.

    An agent that the conversation is handed to has a context of its own beside the first one's, and so has
    each call of an agent as a tool if `subagent` was given the tool. `chat`: models are asked by chat
    completions, not responses. A filter of your own edits `data.model_data` and returns `await told(data)`.
    """

    def __init__(self, *, chat: bool = False) -> None:
        self.contexts, self._chat = AgentContexts(), chat

    async def told(self, data: CallModelData[Any]) -> ModelInputData:
        """The input filter: `data.model_data`, as it is."""
        root, agent, sent = conversation(), data.agent.name, data.model_data
        if root is not None:
            root.agent = root.agent or agent
            context = root if root.agent == agent else self.contexts.beside(root, agent)
            context.messages.sync(self._wire(sent.input, sent.instructions))
            context.activate()
        return sent

    def subagent(self, tool: FunctionTool) -> FunctionTool:
        """The tool that `Agent.as_tool` made, each call of it with a context of its own."""
        run = tool.on_invoke_tool

        async def invoke(call: Any, arguments: str) -> Any:
            with self.contexts.subagent(current(), tool.name, call.tool_call_id):
                return await run(call, arguments)

        tool.on_invoke_tool = invoke
        return tool

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:
        """A tool runs."""
        waiting("tool", tool.name)

    async def on_agent_end(self, context: Any, agent: Any, output: Any) -> None:
        """The run is over."""
        waiting("human")

    def _wire(self, items: Any, instructions: str | None = None) -> list[Any]:
        head = [{"role": "system", "content": instructions}] if instructions and self._chat else []
        return [*head, *(Converter.items_to_messages(items) if self._chat else items)]


class EditedSession:
    """A session whose `pop_item` and `clear_session` are told when they happen, not with the next call."""

    def __init__(self, session: Any, tether: KVTether, context: Context) -> None:
        self._session, self._tether, self._context = session, tether, context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    async def pop_item(self) -> Any:
        """Remove the last item."""
        item = await self._session.pop_item()
        await self._edited()
        return item

    async def clear_session(self) -> None:
        """Remove all."""
        await self._session.clear_session()
        await self._edited()

    async def _edited(self) -> None:
        head = [m for m in self._context.messages[:1] if m.get("role") == "system"]
        self._context.messages.sync([*head, *self._tether._wire(await self._session.get_items())])
