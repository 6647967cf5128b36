"""Pydantic AI: tools, an agent inside a tool, a history processor that sums up what is long."""

import asyncio
import json
import os
import subprocess

from pydantic_ai import Agent
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.messages import ModelMessage, ModelRequest, UserPromptPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

NAME = "pydantic-ai"
API = "chat"
PYTHON = "3.11"
INTEGRATION = "adapter"

RUN = os.environ["HARNESS_RUN"]
MODEL = os.environ["HARNESS_MODEL"]
LONG, KEPT = 7, 3


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


async def task(prompt: str) -> str:
    """Do a task of its own."""
    return (await helper.run(prompt)).output


async def shorten(messages: list[ModelMessage]) -> list[ModelMessage]:
    """What is long gives way to a summary but for the last messages, which begin with an answer."""
    if len(messages) <= LONG:
        return messages
    cut = next(n for n in range(len(messages) - KEPT, len(messages)) if messages[n].kind == "response")
    old = "\n".join(str(part.content) for m in messages[:cut] for part in m.parts if hasattr(part, "content"))
    summary = (await summariser.run(f"Write a summary of this conversation:\n{old}")).output
    return [ModelRequest(parts=[UserPromptPart(summary)]), *messages[cut:]]


# integration begins
import kvtether.http
from kvtether.adapters.pydantic_ai import KVTether

tether = KVTether()
model = OpenAIChatModel(MODEL, provider=OpenAIProvider(http_client=kvtether.http.async_client()))
summariser = Agent(model, model_settings={"extra_headers": {"x-kv-lifecycle": "one_off"}})
# integration ends

helper = Agent(
    model, name="helper", instructions="You help.", tools=[shell, read_file], capabilities=[tether]
)
worker = Agent(
    model,
    name="worker",
    instructions="You work in a directory and use your tools.",
    tools=[shell, read_file, task],
    capabilities=[ProcessHistory(shorten), tether],
)


async def main() -> None:
    did("context", ctx=RUN, **{"as": RUN})
    answer, history = "", []
    for prompt in (os.environ["HARNESS_PROMPT"], os.environ["HARNESS_PROMPT_2"]):
        result = await worker.run(prompt, message_history=history, conversation_id=RUN)
        answer, history = result.output, result.all_messages()
    tether.contexts.close(RUN)
    did("close", ctx=RUN)
    did("done", answer=answer)


asyncio.run(main())
