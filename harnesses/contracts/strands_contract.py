"""Strands' hooks and model against the installed harness."""

import asyncio
import gc
import inspect
import os
import unittest

from proxy_view import contexts, eventually, mismatches, operations, run_page
from strands import Agent, tool
from strands.agent.conversation_manager import (
    SlidingWindowConversationManager,
    SummarizingConversationManager,
)
from strands.hooks import HookRegistry
from strands.models.openai import OpenAIModel

from kvtether.adapters.strands import KVTetherHooks, KVTetherModel

MODEL = KVTetherModel(
    client_args={"base_url": os.environ["OPENAI_BASE_URL"], "api_key": "any"},
    model_id="tiny",
    context_window_limit=4000,
)


@tool
def shell(command: str) -> str:
    """Run a command."""
    return command


def edits(name: str) -> list[dict]:
    return [each for each in operations(name) if each["op"] in ("remove", "replace")]


class TheHook(unittest.TestCase):
    def test_the_model_formats_what_it_sends_in_one_place(self) -> None:
        told = inspect.signature(OpenAIModel.format_request).parameters
        self.assertLessEqual(
            {"messages", "tool_specs", "system_prompt"}, set(told), "Strands changed format_request"
        )
        made = OpenAIModel(model_id="m").format_request(
            [{"role": "user", "content": [{"text": "x"}]}], None, "y"
        )
        self.assertEqual([each["role"] for each in made["messages"]], ["system", "user"])

    def test_the_registry_takes_the_events_that_the_hooks_ask_for(self) -> None:
        registry = HookRegistry()
        registry.add_hook(KVTetherHooks())
        self.assertTrue(registry.has_callbacks())


class Agents(unittest.TestCase):
    def setUp(self) -> None:
        self.hooks = KVTetherHooks()

    def agent(self, name: str, **options: object) -> Agent:
        return Agent(model=MODEL, name=name, hooks=[self.hooks], callback_handler=None, **options)

    def test_a_sliding_window_is_removal_with_its_spans(self) -> None:
        worker = self.agent("slides", conversation_manager=SlidingWindowConversationManager(window_size=2))
        for n in range(3):
            worker(f"[[task talk#w{n}]] Say it.")
        name = self.hooks.context(worker).name
        found = eventually(lambda: edits(name))
        self.assertEqual([(each["op"], each["span"]) for each in found], [("remove", [0, 2])])
        self.assertEqual(mismatches(name), 0)

    def test_a_summary_is_a_replacement_and_its_call_a_one_off(self) -> None:
        manager = SummarizingConversationManager(
            summary_ratio=0.5,
            preserve_recent_messages=1,
            proactive_compression={"compression_threshold": 0.01},
        )
        worker = self.agent("sums-up", conversation_manager=manager)
        for text in ("One? " * 20, "Two? " * 20, "Three? " * 20):
            worker(text)
        name = self.hooks.context(worker).name
        self.assertEqual(eventually(lambda: edits(name))[0]["op"], "replace")
        self.assertEqual(mismatches(name), 0)
        mine = [row for row in contexts().values() if row["agent"] == "sums-up"]
        self.assertGreater(sum(row["one_off"] for row in mine), 0)
        self.assertEqual(sum(not row["one_off"] for row in mine), 1)

    def test_agents_at_the_same_time_may_share_a_model(self) -> None:
        workers = [self.agent(f"twin-{n}", tools=[shell]) for n in range(4)]

        async def both() -> None:
            runs = (each.invoke_async(f"[[task tools#t{n}]] Look.") for n, each in enumerate(workers))
            await asyncio.gather(*runs)

        asyncio.run(both())
        for worker in workers:
            name = self.hooks.context(worker).name
            self.assertEqual(eventually(lambda name=name: contexts(name)[name])["agent"], worker.name)
            self.assertEqual(mismatches(name), 0)
            self.assertEqual(edits(name), [])
            self.assertEqual(self.hooks.context(worker).parent, "")

    def test_an_agent_that_is_gone_has_no_context(self) -> None:
        worker = self.agent("short-lived")
        worker("One?")
        name = self.hooks.context(worker).name
        del worker
        gc.collect()
        eventually(lambda: contexts(name)[name]["closed"])

    def test_the_page(self) -> None:
        page = run_page()
        name = page["hooks"].context(page["agent"]).name
        eventually(lambda: contexts(name)[name]["closed"])
        self.assertEqual(mismatches(name), 0)


if __name__ == "__main__":
    unittest.main()
