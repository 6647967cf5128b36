"""The loop of `openai_loop.py` with the SDK: its lists tell what is done to them."""

import json
import os
import subprocess

import openai

# integration begins
import kvtether.http
from kvtether import Context, current

# integration ends

NAME = "openai-sdk"
API = "chat"
PYTHON = "3.11"
INTEGRATION = "SDK"

TRUTH = os.environ["HARNESS_TRUTH"]
MODEL = os.environ["HARNESS_MODEL"]
LONG = 12
# integration begins
client = openai.OpenAI(max_retries=0, http_client=kvtether.http.client())
# integration ends


def tool(name: str, argument: str) -> dict:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    function = {"name": name, "description": f"Use {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("shell", "command"), tool("read_file", "path"), tool("task", "prompt")]


def did(what: str, **told: object) -> None:
    with open(TRUTH, "a") as file:
        file.write(json.dumps({"did": what, **told}) + "\n")


def use(name: str, arguments: dict) -> str:
    if name == "shell":
        done = subprocess.run(arguments["command"], shell=True, capture_output=True, text=True, timeout=20)
        return done.stdout + done.stderr
    if name == "read_file":
        with open(arguments["path"]) as file:
            return file.read()
    did("subagent", ctx="helper", parent="main")
    # integration begins
    with current().spawn(agent="helper") as helper:
        messages = helper.messages
        # integration ends
        messages.append({"role": "system", "content": "You help."})
        messages.append({"role": "user", "content": arguments["prompt"]})
        answer = run(messages, TOOLS[:2])
    did("close", ctx="helper")
    return answer


def run(messages: list, tools: list) -> str:
    while True:
        if len(messages) > LONG:
            compact(messages)
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = use(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def compact(messages: list) -> None:
    """The list but for system prompt and last turn gives way to a summary, made from a prompt of its own."""
    end = max(at for at, each in enumerate(messages) if each["role"] == "assistant")
    transcript = "\n".join(f"{each['role']}: {each.get('content')}" for each in messages[1:end])
    asked = [{"role": "user", "content": f"Write a summary of this conversation:\n{transcript}"}]
    did("one_off", ctx="summary", parent="main")
    # integration begins
    with current().compact(1, end) as job:
        # integration ends
        answer = client.chat.completions.create(model=MODEL, messages=asked)
        # integration begins
        job.replace([{"role": "user", "content": answer.choices[0].message.content}])
    # integration ends
    did("compact", ctx="main")


def main() -> None:
    did("context", ctx="main")
    answer = ""
    # integration begins
    with Context(agent="main") as ctx:
        messages = ctx.messages
        # integration ends
        messages.append({"role": "system", "content": "You work in a directory and use your tools."})
        for prompt in (os.environ["HARNESS_PROMPT"], os.environ["HARNESS_PROMPT_2"]):
            messages.append({"role": "user", "content": prompt})
            answer = run(messages, TOOLS)
    did("close", ctx="main")
    did("done", answer=answer)


main()
