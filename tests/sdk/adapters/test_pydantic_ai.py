"""The adapter of Pydantic AI: what needs no harness."""

from tests.sdk.adapters.adapter_rules import AdapterRules


class TestPydanticAI(AdapterRules):
    module = "pydantic_ai"
    name = "pydantic-ai"
    package = "pydantic-ai-slim[openai]"
