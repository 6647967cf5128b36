"""The adapter of LangChain: what needs no harness."""

from tests.sdk.adapters.adapter_rules import AdapterRules


class TestLangChain(AdapterRules):
    module = "langchain"
    name = "langchain"
    package = "langchain"
