"""The adapter of CrewAI: what needs no harness."""

from tests.sdk.adapters.adapter_rules import AdapterRules


class TestCrewAI(AdapterRules):
    module = "crewai"
    name = "crewai"
    package = "crewai"
