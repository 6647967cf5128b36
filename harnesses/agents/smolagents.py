"""smolagents: a managed agent, and old observations taken out of the memory by a step callback."""

import json
import os
import subprocess

from smolagents import ActionStep, ToolCallingAgent, tool
from smolagents.memory import FinalAnswerStep

NAME = "smolagents"
API = "chat"
PYTHON = "3.11"
INTEGRATION = "adapter"

# integration begins
from kvtether.adapters.smolagents import KVTetherModel

# integration ends

KEPT = 3


def did(what: str, **told: object) -> None:
    with open(os.environ["HARNESS_TRUTH"], "a") as file:
        file.write(json.dumps({"did": what, **told}) + "\n")


@tool
def shell(command: str) -> str:
    """Run a command.

    Args:
        command: what to run
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20).stdout


@tool
def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: which file
    """
    with open(path) as file:
        return file.read()


def forget(step: ActionStep, agent: ToolCallingAgent) -> None:
    """What was observed more than a few steps ago is of no use any more."""
    for old in [each for each in agent.memory.steps if isinstance(each, ActionStep)][:-KEPT]:
        if len(old.observations or "") > 200:
            old.observations = "(forgotten)"
            did("replace", ctx="main")


def model(agent: str, parent: KVTetherModel | None = None) -> KVTetherModel:
    url, name = os.environ["OPENAI_BASE_URL"], os.environ["HARNESS_MODEL"]
    # integration begins
    return KVTetherModel(name, api_base=url, api_key="any", agent=agent, parent=parent)
    # integration ends


main = model("main")
sub = model("task", main)
helper = ToolCallingAgent(
    tools=[shell, read_file],
    model=sub,
    name="task",
    description="Ask a helper.",
    # integration begins
    step_callbacks={FinalAnswerStep: sub.finished},
    # integration ends
    verbosity_level=0,
)
agent = ToolCallingAgent(
    tools=[shell, read_file],
    model=main,
    managed_agents=[helper],
    # integration begins
    step_callbacks={FinalAnswerStep: main.finished, ActionStep: forget},
    # integration ends
    verbosity_level=0,
)
did("context", ctx="main")
agent.run(os.environ["HARNESS_PROMPT"])
answer = agent.run(os.environ["HARNESS_PROMPT_2"], reset=False)
# integration begins
main.kv.close()
# integration ends
did("close", ctx="main")
did("done", answer=str(answer))
