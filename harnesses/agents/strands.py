"""Strands Agents: a helper as a tool, and summaries of the older half of the list."""

import json
import os
import subprocess

from strands import Agent, tool
from strands.agent.conversation_manager import SummarizingConversationManager

NAME = "strands"
API = "chat"
PYTHON = "3.11"
INTEGRATION = "adapter"

# integration begins
from kvtether.adapters.strands import KVTetherHooks, KVTetherModel

hooks = KVTetherHooks()
# integration ends


def did(what: str, **told: object) -> None:
    with open(os.environ["HARNESS_TRUTH"], "a") as file:
        file.write(json.dumps({"did": what, **told}) + "\n")


@tool
def shell(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20).stdout


@tool
def read_file(path: str) -> str:
    """Read a file."""
    with open(path) as file:
        return file.read()


def agent(name: str, tools: list, **options: object) -> Agent:
    client = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": "any"}
    # integration begins
    model = KVTetherModel(client_args=client, model_id=os.environ["HARNESS_MODEL"], context_window_limit=4000)
    options["hooks"] = [hooks]
    # integration ends
    return Agent(model=model, tools=tools, name=name, callback_handler=None, **options)


helper = agent("helper", [shell, read_file], system_prompt="You help.")
summaries = SummarizingConversationManager(
    summary_ratio=0.6, preserve_recent_messages=2, proactive_compression={"compression_threshold": 0.5}
)
main = agent(
    "main",
    [shell, read_file, helper.as_tool(name="task", description="Ask a helper.")],
    system_prompt="You work in a directory and use your tools.",
    conversation_manager=summaries,
)
did("context", ctx="main")
for prompt in (os.environ["HARNESS_PROMPT"], os.environ["HARNESS_PROMPT_2"]):
    answer = main(prompt)
# integration begins
hooks.close()
# integration ends
did("close", ctx="main")
did("done", answer=str(answer))
