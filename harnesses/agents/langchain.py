"""A deep agent (LangChain, LangGraph, deepagents): tools, a `task` subagent, summaries of a long list."""

import json
import os
import subprocess

from deepagents import create_deep_agent
from deepagents.backends import StateBackend
from deepagents.middleware.summarization import SummarizationMiddleware
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

NAME = "langchain"
API = "chat"
PYTHON = "3.11"
INTEGRATION = "adapter"

RUN = os.environ["HARNESS_RUN"]
MODEL = os.environ["HARNESS_MODEL"]
LIMIT = {"trigger": ("messages", 9), "keep": ("messages", 4)}


def did(what: str, **told: object) -> None:
    with open(os.environ["HARNESS_TRUTH"], "a") as file:
        file.write(json.dumps({"did": what, **told}) + "\n")


def shell(command: str) -> str:
    """Run a command."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
    return done.stdout + done.stderr


def read_file(path: str) -> str:
    """Read a file."""
    with open(path) as file:
        return file.read()


# integration begins
import kvtether.http
from kvtether.adapters.langchain import KVTether

tether = KVTether(agent="deep-agent")
model = ChatOpenAI(model=MODEL, http_client=kvtether.http.client())
summariser = ChatOpenAI(model=MODEL, default_headers={"x-kv-lifecycle": "one_off"})
# integration ends

helper = {
    "name": "general-purpose",
    "description": "Does a task of its own.",
    "system_prompt": "You help.",
    "middleware": [tether],
}
agent = create_deep_agent(
    model=model,
    tools=[shell, read_file],
    system_prompt="You work in a directory and use your tools.",
    middleware=[SummarizationMiddleware(summariser, backend=StateBackend(), **LIMIT), tether],
    subagents=[helper],
    checkpointer=InMemorySaver(),
)

did("context", ctx=RUN, **{"as": RUN})
answer = ""
for prompt in (os.environ["HARNESS_PROMPT"], os.environ["HARNESS_PROMPT_2"]):
    said = {"messages": [{"role": "user", "content": prompt}]}
    answer = agent.invoke(said, {"configurable": {"thread_id": RUN}})["messages"][-1].text
tether.contexts.close(RUN)
did("close", ctx=RUN)
did("done", answer=answer)
