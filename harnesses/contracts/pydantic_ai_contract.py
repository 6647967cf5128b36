"""Pydantic AI's capability against the installed harness."""

import asyncio
import inspect
import unittest

from proxy_view import contexts, eventually, mismatches, operations, run_page
from pydantic_ai import Agent
from pydantic_ai.capabilities import AbstractCapability, ProcessHistory
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.providers.openai import OpenAIProvider

import kvtether.http
from kvtether import Context
from kvtether.adapters.pydantic_ai import KVTether


def model() -> OpenAIChatModel:
    """A model for one event loop."""
    return OpenAIChatModel("tiny", provider=OpenAIProvider(http_client=kvtether.http.async_client()))


class Calls(WrapperModel):
    """Asks the model, and then calls a tool twice at once where its first turn comes."""

    def __init__(self, tool: str) -> None:
        super().__init__(model())
        self.tool = tool

    async def request(self, *args, **kwargs):
        answer = await super().request(*args, **kwargs)
        if not self.tool:
            return answer
        calls = [ToolCallPart(self.tool, {"question": f"{n}?"}, tool_call_id=f"call-{n}") for n in (0, 1)]
        self.tool = ""
        return ModelResponse(parts=calls)


class TheHook(unittest.TestCase):
    def test_capabilities_have_the_hooks_that_the_adapter_fills(self) -> None:
        for hook in ("wrap_run", "prepare_model_request", "wrap_tool_execute", "get_ordering"):
            ours = set(inspect.signature(getattr(KVTether, hook)).parameters)
            theirs = set(inspect.signature(getattr(AbstractCapability, hook)).parameters)
            self.assertEqual(ours, theirs, f"pydantic-ai changed AbstractCapability.{hook}")


class Conversations(unittest.TestCase):
    def setUp(self) -> None:
        self.tether = KVTether()

    def test_a_conversation_is_one_context_and_a_history_processor_is_told(self) -> None:
        async def run() -> None:
            cut = ProcessHistory(lambda messages: messages if len(messages) < 5 else messages[-3:])
            agent = Agent(model(), instructions="Be brief.", capabilities=[self.tether, cut])
            history: list = []
            for text in ("One?", "Two?", "Three?"):
                result = await agent.run(text, message_history=history, conversation_id="p-cut")
                history = result.all_messages()

        asyncio.run(run())
        edits = eventually(lambda: [o for o in operations("p-cut") if o["op"] in ("remove", "replace")])
        self.assertEqual(edits, [{"op": "remove", "span": [1, 3]}])
        self.assertEqual(mismatches("p-cut"), 0)
        eventually(lambda: contexts("p-cut")["p-cut"]["wait"] == "human")
        self.tether.contexts.close("p-cut")
        eventually(lambda: contexts("p-cut")["p-cut"]["closed"])

    def test_system_prompts_and_several_instructions_are_where_the_wire_has_them(self) -> None:
        async def run() -> None:
            said = iter(("It is noon.", "It is one."))
            agent = Agent(
                model(),
                system_prompt="You are old.",
                instructions=["Be brief.", lambda: next(said)],
                capabilities=[self.tether],
            )
            first = await agent.run("One?", conversation_id="p-system")
            await agent.run("Two?", message_history=first.all_messages())

        asyncio.run(run())
        edits = eventually(lambda: [o for o in operations("p-system") if o["op"] in ("remove", "replace")])
        self.assertEqual(edits, [{"op": "replace", "span": [2, 3], "n": 1}])
        self.assertEqual(mismatches("p-system"), 0)

    def test_agents_inside_tools_have_contexts_of_their_own_that_end_with_errors_too(
        self,
    ) -> None:
        async def run() -> None:
            helper = Agent(model(), name="helper", capabilities=[self.tether])
            worker = Agent(Calls("ask"), name="worker", capabilities=[self.tether])

            @worker.tool_plain
            async def ask(question: str) -> str:
                """Ask a helper."""
                await helper.run(question)
                raise ValueError("the tool fails behind its agent")

            await worker.run("Ask.", conversation_id="p-sub")

        with self.assertRaises(ValueError):
            asyncio.run(run())
        for child in ("p-sub:call-0", "p-sub:call-1"):
            eventually(lambda child=child: contexts(child)[child]["closed"])
            self.assertEqual(contexts(child)[child]["agent"], "helper")
        self.assertEqual(contexts("p-sub")["p-sub"]["agent"], "worker")

    def test_a_context_around_a_run_is_its_context_and_streams_are_told(self) -> None:
        async def run() -> None:
            agent = Agent(model(), capabilities=[self.tether])
            with Context("p-around").active():
                async with agent.run_stream("Inside?") as streamed:
                    await streamed.get_output()

        asyncio.run(run())
        eventually(lambda: contexts("p-around")["p-around"]["wait"] == "human")
        self.assertEqual(contexts("p-around")["p-around"]["closed"], "")


class ThePage(unittest.TestCase):
    def test_its_example_runs_and_the_proxy_knows_its_conversation(self) -> None:
        before = set(contexts())
        names = run_page()
        name = names["second"].conversation_id
        eventually(lambda: contexts(name)[name]["closed"])
        self.assertEqual(set(contexts()) - before, {name})


unittest.main()
