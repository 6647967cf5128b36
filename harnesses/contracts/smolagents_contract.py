"""smolagents' model against the installed harness."""

import inspect
import os
import unittest

from proxy_view import contexts, eventually, mismatches, operations, run_page
from smolagents import CodeAgent, ToolCallingAgent, tool
from smolagents.memory import FinalAnswerStep
from smolagents.models import OpenAIModel, get_clean_message_list

from kvtether.adapters.smolagents import KVTetherModel


@tool
def shell(command: str) -> str:
    """Run a command.

    Args:
        command: what to run
    """
    return command


def model(agent: str, parent: KVTetherModel | None = None) -> KVTetherModel:
    return KVTetherModel(
        "tiny", api_base=os.environ["OPENAI_BASE_URL"], api_key="any", agent=agent, parent=parent
    )


def edits(name: str) -> list[dict]:
    return [each for each in operations(name) if each["op"] in ("remove", "replace")]


class TheHook(unittest.TestCase):
    def test_generate_takes_what_the_adapter_reads(self) -> None:
        for method in ("generate", "generate_stream"):
            told = list(inspect.signature(getattr(OpenAIModel, method)).parameters)
            expected = [
                "self",
                "messages",
                "stop_sequences",
                "response_format",
                "tools_to_call_from",
                "kwargs",
            ]
            self.assertEqual(told, expected, f"smolagents changed OpenAIModel.{method}")

    def test_messages_are_merged_by_a_public_function(self) -> None:
        told = list(inspect.signature(get_clean_message_list).parameters)
        expected = [
            "message_list",
            "role_conversions",
            "convert_images_to_image_urls",
            "flatten_messages_as_text",
        ]
        self.assertEqual(told, expected)


class Runs(unittest.TestCase):
    def test_a_run_that_begins_anew_replaces_and_one_that_goes_on_appends(self) -> None:
        own = model("anew")
        agent = ToolCallingAgent(tools=[shell], model=own, verbosity_level=0)
        agent.run("[[task tools#a]] Look.")
        agent.run("[[task talk#a]] Go on.", reset=False)
        self.assertEqual(edits(own.kv.name), [])
        agent.run("[[task talk#b]] Anew.")
        found = eventually(lambda: edits(own.kv.name))
        self.assertEqual([(each["op"], each["span"][0]) for each in found], [("replace", 1)])
        self.assertEqual(mismatches(own.kv.name), 0)

    def test_a_plan_and_a_forced_answer_are_one_offs(self) -> None:
        own = model("plans")
        agent = ToolCallingAgent(
            tools=[shell], model=own, planning_interval=2, max_steps=2, verbosity_level=0
        )
        agent.run("[[task tools#p]] Look.")
        mine = [row for row in contexts().values() if row["agent"] == "plans"]
        self.assertEqual(sum(not row["one_off"] for row in mine), 1)
        self.assertGreaterEqual(sum(row["one_off"] for row in mine), 2)
        self.assertEqual(mismatches(own.kv.name), 0)

    def test_a_managed_agent_is_a_child_and_over_with_its_run(self) -> None:
        own = model("manages")
        sub = model("managed", own)
        helper = ToolCallingAgent(
            tools=[shell],
            model=sub,
            name="task",
            description="Helps.",
            step_callbacks={FinalAnswerStep: sub.finished},
            verbosity_level=0,
        )
        agent = ToolCallingAgent(tools=[shell], model=own, managed_agents=[helper], verbosity_level=0)
        first = sub.kv.name
        agent.run("[[task full#m]] Look.")
        eventually(lambda: contexts(first)[first]["closed"])
        self.assertNotEqual(sub.kv.name, first)
        waits = [each["kind"] for each in operations(own.kv.name) if each["op"] == "waiting"]
        self.assertIn("subagent", waits)

    def test_code_agents_and_streams(self) -> None:
        own = model("codes")
        CodeAgent(tools=[], model=own, max_steps=2, verbosity_level=0).run("Say it.")
        self.assertIn("python", [each.get("tool") for each in operations(own.kv.name)])
        self.assertEqual(mismatches(own.kv.name), 0)
        streamed = model("streams")
        ToolCallingAgent(tools=[shell], model=streamed, stream_outputs=True, verbosity_level=0).run(
            "[[task tools#c]] Look."
        )
        self.assertEqual(mismatches(streamed.kv.name), 0)
        self.assertEqual(edits(streamed.kv.name), [])

    def test_the_page(self) -> None:
        name = run_page()["model"].kv.name
        eventually(lambda: contexts(name)[name]["closed"])
        self.assertEqual(mismatches(name), 0)


if __name__ == "__main__":
    unittest.main()
