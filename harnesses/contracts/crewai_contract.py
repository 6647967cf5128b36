"""CrewAI's interceptor and hooks against the installed harness."""

import inspect
import os
import unittest

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
}

from crewai import LLM, Agent, Crew, Task
from crewai.events import AgentExecutionCompletedEvent, AgentExecutionErrorEvent
from crewai.hooks.llm_hooks import LLMCallHookContext
from crewai.hooks.tool_hooks import ToolCallHookContext
from crewai.llms.hooks import BaseInterceptor
from proxy_view import contexts, eventually, mismatches, run_page

from kvtether.adapters.crewai import KVTether

TETHER = KVTether()


def llm() -> LLM:
    return LLM(model="openai/tiny", base_url=os.environ["OPENAI_BASE_URL"], interceptor=TETHER)


class TheHook(unittest.TestCase):
    def test_the_interceptor_and_the_hooks_have_what_the_adapter_reads(self) -> None:
        for hook in ("on_outbound", "on_inbound", "aon_outbound", "aon_inbound"):
            ours = set(inspect.signature(getattr(KVTether, hook)).parameters)
            theirs = set(inspect.signature(getattr(BaseInterceptor, hook)).parameters)
            self.assertEqual(ours, theirs, f"crewai changed BaseInterceptor.{hook}")
        for of, names in (
            (LLMCallHookContext, {"executor", "messages", "agent", "task"}),
            (ToolCallHookContext, {"tool_name", "agent", "task"}),
        ):
            missing = names - set(inspect.signature(of.__init__).parameters)
            self.assertFalse(missing, f"crewai took {missing} from {of.__name__}")
        for event in (AgentExecutionCompletedEvent, AgentExecutionErrorEvent):
            self.assertIn("task", event.model_fields)


class Crews(unittest.TestCase):
    def test_each_task_is_a_context_that_ends_with_it(self) -> None:
        agent = Agent(role="worker", goal="Work.", backstory="You work.", llm=llm())
        tasks = [Task(description=f"Say {n}.", expected_output="A word.", agent=agent) for n in (1, 2)]
        Crew(agents=[agent], tasks=tasks).kickoff()
        for task in tasks:
            name = str(task.id)
            eventually(lambda name=name: contexts(name)[name]["closed"])
            self.assertEqual(contexts(name)[name]["agent"], "worker")
            self.assertEqual(mismatches(name), 0)

    def test_a_call_outside_of_a_task_is_a_one_off(self) -> None:
        before = set(contexts())
        llm().call("Say a word.")
        (name,) = set(contexts()) - before
        self.assertTrue(contexts(name)[name]["one_off"])


class ThePage(unittest.TestCase):
    def test_its_example_runs_and_the_proxy_knows_its_task(self) -> None:
        names = run_page()
        name = str(names["task"].id)
        eventually(lambda: contexts(name)[name]["closed"])


unittest.main()
