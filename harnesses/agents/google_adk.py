"""Google ADK: a helper behind AgentTool, and compaction of a session's events after each invocation."""

import asyncio
import json
import os
import subprocess
import warnings

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
from google.adk.agents import LlmAgent
from google.adk.apps.app import App, EventsCompactionConfig
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.genai.types import Content, Part

NAME = "google-adk"
API = "chat"
PYTHON = "3.11"
INTEGRATION = "adapter"

# integration begins
from kvtether.adapters.google_adk import KVTetherLiteLlm, KVTetherPlugin

# integration ends

warnings.simplefilter("ignore", UserWarning)


def did(what: str, **told: object) -> None:
    with open(os.environ["HARNESS_TRUTH"], "a") as file:
        file.write(json.dumps({"did": what, **told}) + "\n")


def shell(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20).stdout


def read_file(path: str) -> str:
    """Read a file."""
    with open(path) as file:
        return file.read()


def model() -> KVTetherLiteLlm:
    name = f"openai/{os.environ['HARNESS_MODEL']}"
    # integration begins
    return KVTetherLiteLlm(model=name, api_base=os.environ["OPENAI_BASE_URL"], api_key="any")
    # integration ends


async def main() -> None:
    helper = LlmAgent(
        name="task",
        description="Ask a helper.",
        model=model(),
        instruction="You help.",
        tools=[shell, read_file],
    )
    root = LlmAgent(
        name="root",
        model=model(),
        instruction="You work in a directory and use your tools.",
        tools=[shell, read_file, AgentTool(helper)],
    )
    compaction = EventsCompactionConfig(compaction_interval=1, overlap_size=0)
    # integration begins
    plugins = [KVTetherPlugin()]
    # integration ends
    app = App(name="harness", root_agent=root, plugins=plugins, events_compaction_config=compaction)
    runner = InMemoryRunner(app=app)
    session = await runner.session_service.create_session(app_name=app.name, user_id="someone")
    did("context", ctx="root")
    answer = ""
    for prompt in (os.environ["HARNESS_PROMPT"], os.environ["HARNESS_PROMPT_2"]):
        message = Content(role="user", parts=[Part(text=prompt)])
        async for event in runner.run_async(user_id="someone", session_id=session.id, new_message=message):
            if event.is_final_response() and event.content:
                answer = event.content.parts[0].text
    await runner.close()
    did("close", ctx="root")
    did("done", answer=answer)


asyncio.run(main())
