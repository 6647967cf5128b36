"""LangChain's middleware against the installed harness."""

import asyncio
import inspect
import unittest

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, SummarizationMiddleware
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from proxy_view import contexts, eventually, mismatches, operations, run_page

import kvtether.http
from kvtether import Context
from kvtether.adapters.langchain import KVTether

HOOKS = ("before_agent", "after_agent", "wrap_model_call", "wrap_tool_call")
CLIENTS = {"http_client": kvtether.http.client(), "http_async_client": kvtether.http.async_client()}
MODEL = ChatOpenAI(model="tiny", use_responses_api=False, **CLIENTS)


def thread(name: str) -> dict:
    return {"configurable": {"thread_id": name}}


def said(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


class TheHook(unittest.TestCase):
    def test_the_middleware_has_the_hooks_that_the_adapter_fills(self) -> None:
        for hook in HOOKS:
            ours = set(inspect.signature(getattr(KVTether, hook)).parameters)
            theirs = set(inspect.signature(getattr(AgentMiddleware, hook)).parameters)
            self.assertEqual(ours, theirs, f"LangChain changed AgentMiddleware.{hook}")


class Threads(unittest.TestCase):
    def setUp(self) -> None:
        self.tether = KVTether(agent="contract")

    def test_a_thread_is_one_context_over_its_runs_and_edits_are_told_with_their_spans(self) -> None:
        agent = create_agent(
            MODEL, system_prompt="Be brief.", middleware=[self.tether], checkpointer=InMemorySaver()
        )
        for text in ("One?", "Two?", "Three?"):
            agent.invoke(said(text), thread("t-edit"))
        known = agent.get_state(thread("t-edit")).values["messages"]
        agent.update_state(
            thread("t-edit"), {"messages": [RemoveMessage(id=known[0].id), RemoveMessage(id=known[1].id)]}
        )
        agent.invoke(said("Four?"), thread("t-edit"))
        edits = eventually(lambda: [o for o in operations("t-edit") if o["op"] in ("remove", "replace")])
        self.assertEqual(edits, [{"op": "remove", "span": [1, 3]}])
        self.assertEqual(mismatches("t-edit"), 0)
        self.assertEqual(contexts("t-edit")["t-edit"]["agent"], "contract")
        eventually(lambda: contexts("t-edit")["t-edit"]["wait"] == "human")
        self.tether.contexts.close("t-edit")
        eventually(lambda: contexts("t-edit")["t-edit"]["closed"])

    def test_a_summary_is_a_replacement_and_its_call_a_one_off(self) -> None:
        summariser = ChatOpenAI(model="tiny", default_headers={"x-kv-lifecycle": "one_off"})
        cut = SummarizationMiddleware(summariser, trigger=("messages", 6), keep=("messages", 2))
        agent = create_agent(MODEL, middleware=[cut, self.tether], checkpointer=InMemorySaver())
        before = set(contexts())
        for text in ("One?", "Two?", "Three?", "Four?"):
            agent.invoke(said(text), thread("t-sum"))
        edits = eventually(lambda: [o for o in operations("t-sum") if o["op"] in ("remove", "replace")])
        self.assertEqual((edits[0]["op"], edits[0]["span"][0]), ("replace", 0))
        self.assertEqual(mismatches("t-sum"), 0)
        others = [row for name, row in contexts().items() if name not in before and name != "t-sum"]
        self.assertTrue(others)
        self.assertTrue(all(row["one_off"] for row in others))

    def test_a_run_without_a_thread_ends_its_context_and_a_context_around_it_stays(self) -> None:
        agent = create_agent(MODEL, middleware=[self.tether])
        before = set(contexts())
        agent.invoke(said("Alone?"))
        (name,) = set(contexts()) - before
        eventually(lambda: contexts(name)[name]["closed"])
        with Context("t-around").active():
            agent.invoke(said("Inside?"))
        self.assertEqual(contexts("t-around")["t-around"]["closed"], "")

    def test_agents_inside_tools_have_contexts_of_their_own_that_end_with_the_tool_async_and_with_errors(
        self,
    ) -> None:
        inner = create_agent(MODEL, system_prompt="You help.", middleware=[self.tether])

        async def ask(question: str) -> str:
            """Ask a helper."""
            await inner.ainvoke(said(question))
            raise ValueError("the tool fails behind its agent")

        class Calls(AgentMiddleware):
            """Plays a model that calls the tool twice at once."""

            async def awrap_model_call(self, request, handler):  # type: ignore[no-untyped-def]
                answer = await handler(request)
                if isinstance(request.messages[-1], HumanMessage):
                    calls = [
                        {"name": "ask", "args": {"question": f"{n}?"}, "id": f"call-{n}"} for n in (1, 2)
                    ]
                    answer.result = [AIMessage(content="", tool_calls=calls)]
                return answer

        agent = create_agent(
            MODEL, tools=[ask], middleware=[Calls(), self.tether], checkpointer=InMemorySaver()
        )
        with self.assertRaises(ValueError):
            asyncio.run(agent.ainvoke(said("Ask."), thread("t-sub")))
        for child in ("t-sub:call-1", "t-sub:call-2"):
            eventually(lambda child=child: contexts(child)[child]["closed"])
        self.assertIn("subagent", [o.get("kind") for o in operations("t-sub")])

    def test_settings_of_the_model_and_of_others_stay(self) -> None:
        seen = []

        class Looks(AgentMiddleware):
            def wrap_model_call(self, request, handler):  # type: ignore[no-untyped-def]
                seen.append(request.model_settings)
                return handler(request)

        model = ChatOpenAI(model="tiny", extra_body={"seed": 7}, **CLIENTS)
        create_agent(model, middleware=[self.tether, Looks()]).invoke(said("Settings?"))
        self.assertEqual(seen[0]["extra_body"]["seed"], 7)
        self.assertIn("x-kv-lifecycle", seen[0]["extra_headers"])


class ThePage(unittest.TestCase):
    def test_its_example_runs_and_the_proxy_knows_its_thread(self) -> None:
        run_page()
        eventually(lambda: contexts("ticket-7")["ticket-7"]["closed"])
        self.assertEqual(contexts("ticket-7")["ticket-7"]["agent"], "researcher")


unittest.main()
