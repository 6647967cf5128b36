"""The adapter of the OpenAI Agents SDK: what needs no harness."""

from tests.sdk.adapters.adapter_rules import AdapterRules


class TestOpenAIAgents(AdapterRules):
    module = "openai_agents"
    name = "openai-agents"
    package = "openai-agents"
