"""OpenHands' LLM against the installed harness."""

import inspect
import os
import unittest

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}
from openhands.sdk import LLM, Agent, Conversation, LLMSummarizingCondenser
from openhands.sdk.llm import Message, TextContent
from openhands.sdk.llm.call_context import LLMCallContext
from proxy_view import contexts, eventually, mismatches, operations, parent, run_page

from kvtether.adapters.openhands import KVTetherLLM, end


def llm() -> KVTetherLLM:
    return KVTetherLLM(
        model="openai/tiny",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key="any",
        usage_id="agent",
        num_retries=0,
    )


def conversation(**options: object) -> Conversation:
    agent = Agent(llm=llm(), tools=[], **options)
    return Conversation(agent=agent, workspace=os.getcwd(), visualizer=None)


def lasting(before: set[str]) -> list[dict]:
    return [row for name, row in contexts().items() if name not in before and not row["one_off"]]


class TheHook(unittest.TestCase):
    def test_generate_is_asked_with_the_conversation(self) -> None:
        for method in ("generate", "agenerate"):
            told = list(inspect.signature(getattr(LLM, method)).parameters)
            self.assertEqual(told[:3], ["self", "messages", "tools"], f"OpenHands changed LLM.{method}")
            self.assertLessEqual({"call_context", "kwargs"}, set(told), f"OpenHands changed LLM.{method}")
        self.assertIn("session_id", inspect.signature(LLMCallContext).parameters)

    def test_a_copy_of_the_llm_tells_as_well(self) -> None:
        self.assertIsInstance(llm().model_copy(update={"usage_id": "other"}), KVTetherLLM)

    def test_formatting_changes_no_message(self) -> None:
        message = Message(role="user", content=[TextContent(text="x")])
        before = message.model_dump()
        self.assertEqual(llm().format_messages_for_llm([message])[0]["role"], "user")
        self.assertEqual(message.model_dump(), before)


class Conversations(unittest.TestCase):
    def test_a_condensation_is_a_replacement_and_its_summary_a_one_off(self) -> None:
        own = llm()
        condenser = LLMSummarizingCondenser(
            llm=own.model_copy(update={"usage_id": "condenser"}), max_size=8, keep_first=1
        )
        before = set(contexts())
        talk = conversation(condenser=condenser)
        for n in range(8):
            talk.send_message(f"[[task talk#c{n}]] Say it.")
            talk.run()
        talk.close()
        end(talk.id)
        (row,) = lasting(before)
        name = row["context_id"]
        eventually(lambda: contexts(name)[name]["closed"])
        edits = [each["op"] for each in operations(name) if each["op"] in ("remove", "replace")]
        self.assertIn("replace", edits)
        self.assertEqual(mismatches(name), 0)
        added = [row for name, row in contexts().items() if name not in before]
        self.assertGreater(sum(row["one_off"] for row in added), 0)

    def test_conversations_may_share_an_llm(self) -> None:
        before = set(contexts())
        agent = Agent(llm=llm(), tools=[])
        talks = [Conversation(agent=agent, workspace=os.getcwd(), visualizer=None) for _ in range(2)]
        for turn in range(2):
            for n, talk in enumerate(talks):
                talk.send_message(f"[[task talk#s{n}.{turn}]] Say it.")
                talk.run()
        rows = lasting(before)
        self.assertEqual(len(rows), 2)
        for row in rows:
            self.assertEqual(mismatches(row["context_id"]), 0)
            self.assertFalse(parent(row["context_id"]))
        for talk in talks:
            talk.close()
            end(talk.id)

    def test_the_page(self) -> None:
        before = set(contexts())
        run_page()
        (row,) = lasting(before)
        eventually(lambda: contexts(row["context_id"])[row["context_id"]]["closed"])
        self.assertEqual(mismatches(row["context_id"]), 0)


if __name__ == "__main__":
    unittest.main()
