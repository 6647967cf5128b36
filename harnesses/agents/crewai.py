"""CrewAI: a crew of two, one of whom is asked by a tool, and a task for each thing that the user says."""

import json
import os
import subprocess
from contextvars import ContextVar

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
}

from crewai import Agent, Crew, Task
from crewai.hooks import register_before_llm_call_hook
from crewai.llms.providers.openai.completion import OpenAICompletion
from crewai.tools import tool

NAME = "crewai"
API = "chat"
PYTHON = "3.11"
INTEGRATION = "adapter"

MODEL = os.environ["HARNESS_MODEL"]


def did(what: str, **told: object) -> None:
    with open(os.environ["HARNESS_TRUTH"], "a") as file:
        file.write(json.dumps({"did": what, **told}) + "\n")


@tool
def shell(command: str) -> str:
    """Run a command."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
    return done.stdout + done.stderr


@tool
def read_file(path: str) -> str:
    """Read a file."""
    with open(path) as file:
        return file.read()


class ShortWindow(OpenAICompletion):
    """A model whose window is soon full: by messages, so that no tool's result is cut for it."""

    def is_context_window_overflowing_threshold(self, messages, tools=None, response_model=None) -> bool:
        return len(messages) > 9


# integration begins
from kvtether.adapters.crewai import KVTether

# integration ends

task_of: ContextVar[str] = ContextVar("task_of", default="aside")
known: set[str] = set()


class Witness(KVTether):
    """Marks each request with the truth of it: the task it is made for, by what it begins with."""

    def on_outbound(self, message):
        is_summary = "tools" not in json.loads(message.content)
        message.headers["x-harness-truth"] = task_of.get() + ("; relation=one-off" if is_summary else "")
        return super().on_outbound(message)


def began(call) -> None:
    task_of.set(str(call.task.id))
    if task_of.get() not in known:
        known.add(task_of.get())
        did("context", ctx=task_of.get(), **{"as": task_of.get()})


register_before_llm_call_hook(began)
# integration begins
llm = ShortWindow(model=MODEL, base_url=os.environ["OPENAI_BASE_URL"], interceptor=Witness())
# integration ends
tools = [shell, read_file]
worker = Agent(
    role="worker", goal="Do it.", backstory="You work.", llm=llm, tools=tools, allow_delegation=True
)
helper = Agent(role="a coworker", goal="Help.", backstory="You help.", llm=llm, tools=tools)

answer = ""
for prompt in (os.environ["HARNESS_PROMPT"], os.environ["HARNESS_PROMPT_2"]):
    job = Task(description=prompt, expected_output="An answer.", agent=worker)
    answer = str(Crew(agents=[worker, helper], tasks=[job]).kickoff())
for each in known:
    did("close", ctx=each)
did("done", answer=answer)
