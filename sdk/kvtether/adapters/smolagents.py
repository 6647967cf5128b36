"""smolagents: a model that gives its agent a context; plans and forced answers are one-offs.

Each agent has a model object of its own, and tells it when a run is over:
`ToolCallingAgent(model=model, step_callbacks={FinalAnswerStep: model.finished}, …)`.
"""

from typing import Any

from kvtether.context import Context

try:
    from smolagents.agents import MultiStepAgent
    from smolagents.models import OpenAIModel, get_clean_message_list, tool_role_conversions
except ImportError as missing:
    raise ImportError(
        "kvtether.adapters.smolagents needs smolagents 1.26 or later: pip install 'smolagents[openai]'"
    ) from missing


class KVTetherModel(OpenAIModel):
    """`OpenAIModel` of one agent. `parent` is the model of the agent that manages it."""

    kv: Context
    """The agent's context."""

    def __init__(
        self, *args: Any, agent: str = "", parent: "KVTetherModel | None" = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._parent, self._agent = parent, agent
        self._begin()

    def _begin(self) -> None:
        self.kv = self._parent.kv.spawn(agent=self._agent) if self._parent else Context(agent=self._agent)

    def generate(self, messages: Any, stop_sequences: Any = None, *args: Any, **kwargs: Any) -> Any:
        turn, told = self._told(messages, stop_sequences, *args, **kwargs)
        answer = super().generate(messages, stop_sequences, *args, **kwargs, **told)
        if turn:
            called = answer.tool_calls[0].function.name if answer.tool_calls else "python"
            self.kv.waiting("subagent" if called in self._helpers else "tool", called)
        return answer

    def generate_stream(self, messages: Any, stop_sequences: Any = None, *args: Any, **kwargs: Any) -> Any:
        _, told = self._told(messages, stop_sequences, *args, **kwargs)
        return super().generate_stream(messages, stop_sequences, *args, **kwargs, **told)

    def _told(
        self, messages: Any, stop: Any, response_format: Any = None, tools_to_call_from: Any = None, **_: Any
    ) -> tuple[bool, dict[str, Any]]:
        if not tools_to_call_from and "Observation:" not in (stop or ()):
            return False, self.kv.one_off().call()
        self._helpers = [tool.name for tool in tools_to_call_from or () if isinstance(tool, MultiStepAgent)]
        roles = self.custom_role_conversions or tool_role_conversions
        self.kv.messages.sync(get_clean_message_list(messages, roles, True, self.flatten_messages_as_text))
        return True, self.kv.call()

    def finished(self, step: Any, agent: MultiStepAgent) -> None:
        """Callback for `FinalAnswerStep`: a managed agent is done, any other waits for its user."""
        if hasattr(agent, "inputs"):
            self.kv.close()
            self._begin()
        else:
            self.kv.waiting("human")
