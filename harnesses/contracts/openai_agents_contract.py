"""The OpenAI Agents SDK's hooks against the installed harness."""

import asyncio
import dataclasses
import inspect
import unittest

from agents import (
    Agent,
    FunctionTool,
    ModelResponse,
    RunConfig,
    RunHooks,
    Runner,
    Session,
    SQLiteSession,
    Usage,
    set_tracing_disabled,
)
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from agents.run import CallModelData, ModelInputData
from openai import AsyncOpenAI
from openai.types.responses import ResponseFunctionToolCall
from proxy_view import contexts, eventually, mismatches, operations, run_page

import kvtether.http
from kvtether.adapters.openai_agents import EditedSession, KVTether

set_tracing_disabled(True)


def client() -> AsyncOpenAI:
    """A client for one event loop."""
    return AsyncOpenAI(http_client=kvtether.http.async_client())


class Calls(OpenAIChatCompletionsModel):
    """Asks the model, and then says something else where its first turn comes: calls of tools."""

    def __init__(self, *calls: tuple[str, str]) -> None:
        super().__init__("tiny", client())
        self.calls = list(calls)

    async def get_response(self, *args, **kwargs):
        answer = await super().get_response(*args, **kwargs)
        if not self.calls:
            return answer
        made = [
            ResponseFunctionToolCall(type="function_call", name=name, arguments=said, call_id=f"call-{n}")
            for n, (name, said) in enumerate(self.calls)
        ]
        self.calls = []
        return ModelResponse(output=made, usage=Usage(), response_id=None)


class TheHook(unittest.TestCase):
    def test_runs_have_the_hooks_that_the_adapter_fills(self) -> None:
        for hook in ("on_tool_start", "on_agent_end"):
            ours = set(inspect.signature(getattr(KVTether, hook)).parameters)
            theirs = set(inspect.signature(getattr(RunHooks, hook)).parameters)
            self.assertEqual(ours, theirs, f"openai-agents changed RunHooks.{hook}")
        for of, names in (
            (RunConfig, {"call_model_input_filter"}),
            (CallModelData, {"model_data", "agent"}),
            (ModelInputData, {"input", "instructions"}),
            (FunctionTool, {"name", "on_invoke_tool"}),
        ):
            missing = names - {each.name for each in dataclasses.fields(of)}
            self.assertFalse(missing, f"openai-agents took {missing} from {of.__name__}")

    def test_an_edited_session_is_a_session(self) -> None:
        tether = KVTether()
        edited = EditedSession(SQLiteSession("s"), tether, tether.contexts.named("s"))
        self.assertIsInstance(edited, Session)


class Conversations(unittest.TestCase):
    def setUp(self) -> None:
        self.tether = KVTether(chat=True)
        self.config = RunConfig(call_model_input_filter=self.tether.told)

    def test_sessions_are_edited_and_told_on_both_apis(self) -> None:
        models = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
        for api, model in models.items():
            with self.subTest(api=api):
                asyncio.run(self._edited(f"s-{api}", KVTether(chat=api == "chat"), model))
                # The last item is the answer, which no call has sent yet; the one before it is the user's.
                at = 3 if api == "chat" else 2
                edits = eventually(
                    lambda api=api: [o for o in operations(f"s-{api}") if o["op"] in ("remove", "replace")]
                )
                self.assertEqual(edits, [{"op": "remove", "span": [at, at + 1]}])
                self.assertEqual(mismatches(f"s-{api}"), 0)

    async def _edited(self, name: str, tether: KVTether, model: type) -> None:
        config = RunConfig(call_model_input_filter=tether.told)
        agent = Agent(name="main", instructions="Be brief.", model=model("tiny", client()))
        with tether.contexts.conversation(name) as context:
            session = EditedSession(SQLiteSession(name), tether, context)
            for text in ("One?", "Two?"):
                await Runner.run(agent, text, session=session, run_config=config, hooks=tether)
            await session.pop_item()
            await session.pop_item()
            await asyncio.to_thread(eventually, lambda: any(o["op"] == "remove" for o in operations(name)))
            await Runner.run(agent, "Three?", session=session, run_config=config, hooks=tether)

    def test_agents_as_tools_and_handoffs_have_contexts_of_their_own_that_end(
        self,
    ) -> None:
        async def run() -> str:
            helper = Agent(name="helper", instructions="You help.", model=Calls())
            writer = Agent(name="writer", instructions="You write.", model=Calls())
            ask = self.tether.subagent(helper.as_tool("ask", "Asks."))
            model = Calls(("ask", '{"input": "x"}'), ("ask", '{"input": "y"}'))
            main = Agent(name="main", instructions="Lead.", model=model, tools=[ask], handoffs=[writer])
            with self.tether.contexts.conversation("c-sub"):
                await Runner.run(main, "Ask both.", run_config=self.config, hooks=self.tether)
                main.model = Calls(("transfer_to_writer", "{}"))
                result = await Runner.run(main, "Hand over.", run_config=self.config, hooks=self.tether)
            return result.last_agent.name

        self.assertEqual(asyncio.run(run()), "writer")
        for child in ("c-sub:call-0", "c-sub:call-1"):
            eventually(lambda child=child: contexts(child)[child]["closed"])
        self.assertEqual(contexts("c-sub:writer")["c-sub:writer"]["closed"], "")
        self.tether.contexts.close("c-sub")
        for name in ("c-sub", "c-sub:writer"):
            eventually(lambda name=name: contexts(name)[name]["closed"])

    def test_streamed_runs_are_told_and_nothing_is_told_outside_of_a_conversation(self) -> None:
        async def run() -> None:
            agent = Agent(name="main", model=OpenAIChatCompletionsModel("tiny", client()))
            with self.tether.contexts.conversation("c-stream"):
                streamed = Runner.run_streamed(agent, "One?", run_config=self.config, hooks=self.tether)
                async for _ in streamed.stream_events():
                    pass
            await Runner.run(agent, "Outside?", run_config=self.config, hooks=self.tether)

        before = set(contexts())
        asyncio.run(run())
        added = set(contexts()) - before
        self.assertIn("c-stream", added)
        self.assertEqual(len(added), 2)
        self.assertEqual(mismatches("c-stream"), 0)


class ThePage(unittest.TestCase):
    def test_its_example_runs_and_the_proxy_knows_its_conversation(self) -> None:
        run_page()
        eventually(lambda: contexts("ticket-7")["ticket-7"]["closed"])
        self.assertEqual(contexts("ticket-7")["ticket-7"]["agent"], "worker")


unittest.main()
