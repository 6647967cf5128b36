"""The OpenAI Agents SDK: tools, an agent as a tool, a session that is cut when it is long."""

import asyncio
import json
import os
import subprocess

from agents import (
    Agent,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

NAME = "openai-agents"
API = "responses"
PYTHON = "3.11"
INTEGRATION = "adapter"

RUN = os.environ["HARNESS_RUN"]
MODEL = os.environ["HARNESS_MODEL"]
LONG, KEPT = 10, 6
set_tracing_disabled(True)
set_default_openai_api("responses")


def did(what: str, **told: object) -> None:
    with open(os.environ["HARNESS_TRUTH"], "a") as file:
        file.write(json.dumps({"did": what, **told}) + "\n")


@function_tool
def shell(command: str) -> str:
    """Run a command."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
    return done.stdout + done.stderr


@function_tool
def read_file(path: str) -> str:
    """Read a file."""
    with open(path) as file:
        return file.read()


class Window:
    """What is long gives way to a summary but for the last items, from a message or call on. A session keeps
    everything: this is what the model is shown of it."""

    def __init__(self) -> None:
        self.num_gone = 0
        self.summary: list[dict] = []

    async def __call__(self, data):
        items = data.model_data.input
        if data.agent.name == "worker":
            shown = [*self.summary, *items[self.num_gone :]]
            if len(shown) > LONG:
                cut = next(
                    n
                    for n in range(len(shown) - KEPT, len(shown))
                    if "output" not in str(shown[n].get("type"))
                )
                self.num_gone += cut - len(self.summary)
                asked = f"Write a summary of this conversation:\n{json.dumps(shown[:cut])}"
                answer = await summariser.responses.create(model=MODEL, input=asked)
                self.summary = [{"role": "user", "content": answer.output_text}]
            data.model_data.input = [*self.summary, *items[self.num_gone :]]
        return await tether.told(data)


# integration begins
import kvtether.http
from kvtether.adapters.openai_agents import EditedSession, KVTether

tether = KVTether()
set_default_openai_client(AsyncOpenAI(http_client=kvtether.http.async_client()), use_for_tracing=False)
summariser = AsyncOpenAI(default_headers={"x-kv-lifecycle": "one_off"})
# integration ends

helper = Agent(name="helper", instructions="You help.", model=MODEL, tools=[shell, read_file])
task = tether.subagent(helper.as_tool("task", "Does a task of its own."))
worker = Agent(
    name="worker",
    instructions="You work in a directory and use your tools.",
    model=MODEL,
    tools=[shell, read_file, task],
)


async def main() -> None:
    did("context", ctx=RUN, **{"as": RUN})
    answer, window = "", Window()
    with tether.contexts.conversation(RUN) as context:
        session = EditedSession(SQLiteSession(RUN), tether, context)
        for prompt in (os.environ["HARNESS_PROMPT"], os.environ["HARNESS_PROMPT_2"]):
            config = RunConfig(call_model_input_filter=window)
            result = await Runner.run(worker, prompt, session=session, run_config=config, hooks=tether)
            answer = str(result.final_output)
    tether.contexts.close(RUN)
    did("close", ctx=RUN)
    did("done", answer=answer)


asyncio.run(main())
