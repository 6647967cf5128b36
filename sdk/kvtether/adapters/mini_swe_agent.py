"""mini-swe-agent: classes for agent and model that say whose each call is, and when a command runs.

`mini --agent-class kvtether.adapters.mini_swe_agent.KVTetherInteractiveAgent
--model-class kvtether.adapters.mini_swe_agent.KVTetherModel`, or the two in a configuration file.
"""

from typing import Any

from kvtether.context import Context, current

try:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.agents.interactive import InteractiveAgent
    from minisweagent.models.litellm_model import LitellmModel
except ImportError as missing:
    raise ImportError(
        "kvtether.adapters.mini_swe_agent needs mini-swe-agent 2.x: pip install mini-swe-agent"
    ) from missing


class KVTetherRuns:
    """For an agent class, before the one it extends: each run is a context, over when the run is."""

    kv: Context
    """The context of the run."""

    def run(self, task: str = "", **variables: Any) -> Any:
        outer = current()
        self.kv = outer.spawn(agent="mini-swe-agent") if outer else Context(agent="mini-swe-agent")
        try:
            return super().run(task, **variables)  # type: ignore[misc]
        finally:
            self.kv.close()

    def query(self) -> Any:
        self.kv.messages.sync(self.messages)  # type: ignore[attr-defined]
        with self.kv.active():
            return super().query()  # type: ignore[misc]

    def execute_actions(self, message: dict[str, Any]) -> Any:
        self.kv.waiting("tool", "bash")
        return super().execute_actions(message)  # type: ignore[misc]


class KVTetherAgent(KVTetherRuns, DefaultAgent):
    """`default` of mini-swe-agent."""


class KVTetherInteractiveAgent(KVTetherRuns, InteractiveAgent):
    """`interactive` of mini-swe-agent."""


class KVTetherModel(LitellmModel):
    """`litellm` of mini-swe-agent."""

    def query(self, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
        context = current()
        for key, value in (context.call() if context else {}).items():
            own = kwargs.get(key) or self.config.model_kwargs.get(key)
            kwargs[key] = {**(own or {}), **(value or {})}
        return super().query(messages, **kwargs)
