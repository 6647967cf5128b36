"""ADK's plugin and model against the installed harness."""

import asyncio
import inspect
import os
import unittest
import warnings

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
from google.adk.agents import LlmAgent
from google.adk.apps.app import App, EventsCompactionConfig
from google.adk.models.lite_llm import LiteLlm, LiteLLMClient
from google.adk.plugins.base_plugin import BasePlugin
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, HttpOptions, Part
from proxy_view import contexts, eventually, mismatches, operations, run_page

from kvtether.adapters.google_adk import KVTetherLiteLlm, KVTetherPlugin

warnings.simplefilter("ignore", UserWarning)
HOOKS = ("before_model_callback", "before_tool_callback", "after_run_callback", "close")
MODEL = KVTetherLiteLlm(model="openai/tiny", api_base=os.environ["OPENAI_BASE_URL"], api_key="any")


def shell(command: str) -> str:
    """Run a command."""
    return command


async def ask(runner: InMemoryRunner, session: str, *texts: str) -> None:
    for text in texts:
        said = Content(role="user", parts=[Part(text=text)])
        async for _ in runner.run_async(user_id="u", session_id=session, new_message=said):
            pass


def runner_of(name: str, **options: object) -> InMemoryRunner:
    root = LlmAgent(name=name, model=MODEL, instruction="Be brief.", tools=[shell])
    return InMemoryRunner(app=App(name="contract", root_agent=root, plugins=[KVTetherPlugin()], **options))


def of_agent(name: str) -> list[dict]:
    return [row for row in contexts().values() if row["agent"] == name and not row["one_off"]]


class TheHook(unittest.TestCase):
    def test_the_plugin_has_the_callbacks_that_the_adapter_fills(self) -> None:
        for hook in HOOKS:
            ours = set(inspect.signature(getattr(KVTetherPlugin, hook)).parameters)
            theirs = set(inspect.signature(getattr(BasePlugin, hook)).parameters)
            self.assertEqual(ours, theirs, f"ADK changed BasePlugin.{hook}")

    def test_the_model_has_a_client_that_can_be_another(self) -> None:
        self.assertIn("llm_client", LiteLlm.model_fields, "ADK took LiteLlm.llm_client away")
        told = list(inspect.signature(LiteLLMClient.acompletion).parameters)
        self.assertEqual(
            told[:4], ["self", "model", "messages", "tools"], "ADK changed LiteLLMClient.acompletion"
        )
        self.assertIn("headers", HttpOptions.model_fields)


class Sessions(unittest.TestCase):
    def test_compaction_is_a_replacement_and_its_summary_a_one_off(self) -> None:
        async def run() -> None:
            compaction = EventsCompactionConfig(compaction_interval=1, overlap_size=0)
            runner = runner_of("compacts", events_compaction_config=compaction)
            session = await runner.session_service.create_session(app_name="contract", user_id="u")
            await ask(runner, session.id, "[[task tools#k]] Look.", "Two?", "Three?")
            await runner.close()

        before = set(contexts())
        asyncio.run(run())
        (row,) = of_agent("compacts")
        name = row["context_id"]
        eventually(lambda: contexts(name)[name]["closed"])
        edits = [each["op"] for each in operations(name) if each["op"] in ("remove", "replace")]
        self.assertEqual(set(edits), {"replace"})
        self.assertEqual(mismatches(name), 0)
        added = [row for name, row in contexts().items() if name not in before]
        self.assertGreater(sum(row["one_off"] for row in added), 0)

    def test_sessions_at_the_same_time_may_share_agents_and_model(self) -> None:
        async def run() -> None:
            runner = runner_of("twin")
            service = runner.session_service
            made = [await service.create_session(app_name="contract", user_id="u") for _ in range(3)]
            await asyncio.gather(
                *(ask(runner, s.id, f"[[task tools#s{n}]] Look.", "Two?") for n, s in enumerate(made))
            )
            await runner.close()

        asyncio.run(run())
        rows = of_agent("twin")
        self.assertEqual(len(rows), 3)
        for row in rows:
            self.assertEqual(mismatches(row["context_id"]), 0)

    def test_the_page(self) -> None:
        run_page()
        (row,) = of_agent("researcher")
        eventually(lambda: contexts(row["context_id"])[row["context_id"]]["closed"])
        self.assertEqual(mismatches(row["context_id"]), 0)


if __name__ == "__main__":
    unittest.main()
