"""CrewAI: a crew of two, one of whom is asked by a tool, and a task for each thing that the user says."""

import json
import os
import subprocess

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "OTEL_SDK_DISABLED": "true",
}

from crewai import LLM, Agent, Crew, Task
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


# integration begins
from kvtether.adapters.crewai import KVTether

tether = KVTether()
llm = LLM(model=f"openai/{MODEL}", interceptor=tether)
# integration ends

worker = Agent(
    role="worker",
    goal="Do it.",
    backstory="You use tools.",
    llm=llm,
    tools=[shell, read_file],
    allow_delegation=True,
)
helper = Agent(role="helper", goal="Help.", backstory="You help.", llm=llm, tools=[shell, read_file])

answer = ""
for prompt in (os.environ["HARNESS_PROMPT"], os.environ["HARNESS_PROMPT_2"]):
    job = Task(description=prompt, expected_output="An answer.", agent=worker)
    answer = str(Crew(agents=[worker, helper], tasks=[job]).kickoff())
did("done", answer=answer)
