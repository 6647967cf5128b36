"""A loop over the openai client: tools, a helper of its own context, a summary when the list is long."""

import json
import os
import subprocess

import openai

NAME = "openai-loop"
API = "chat"
PYTHON = "3.11"
INTEGRATION = "none"

TRUTH = os.environ["HARNESS_TRUTH"]
MODEL = os.environ["HARNESS_MODEL"]
LONG = 12
client = openai.OpenAI(max_retries=0)


def tool(name: str, argument: str) -> dict:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    function = {"name": name, "description": f"Use {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("shell", "command"), tool("read_file", "path"), tool("task", "prompt")]


def did(what: str, **told: object) -> None:
    with open(TRUTH, "a") as file:
        file.write(json.dumps({"did": what, **told}) + "\n")


def use(name: str, arguments: dict, parent: str) -> str:
    if name == "shell":
        done = subprocess.run(arguments["command"], shell=True, capture_output=True, text=True, timeout=20)
        return done.stdout + done.stderr
    if name == "read_file":
        with open(arguments["path"]) as file:
            return file.read()
    ctx = f"{parent}.helper"
    did("subagent", ctx=ctx, parent=parent)
    helper = [{"role": "system", "content": "You help."}, {"role": "user", "content": arguments["prompt"]}]
    answer = run(ctx, helper, TOOLS[:2])
    did("close", ctx=ctx)
    return answer


def run(ctx: str, messages: list, tools: list) -> str:
    while True:
        if len(messages) > LONG:
            compact(ctx, messages)
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = use(call.function.name, json.loads(call.function.arguments), ctx)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def compact(ctx: str, messages: list) -> None:
    """The list but for system prompt and last turn gives way to a summary, made from a prompt of its own."""
    end = max(at for at, each in enumerate(messages) if each["role"] == "assistant")
    transcript = "\n".join(f"{each['role']}: {each.get('content')}" for each in messages[1:end])
    did("one_off", ctx=f"{ctx}.summary", parent=ctx)
    asked = [{"role": "user", "content": f"Write a summary of this conversation:\n{transcript}"}]
    answer = client.chat.completions.create(model=MODEL, messages=asked)
    messages[1:end] = [{"role": "user", "content": answer.choices[0].message.content}]
    did("compact", ctx=ctx)


def main() -> None:
    did("context", ctx="main")
    messages = [{"role": "system", "content": "You work in a directory and use your tools."}]
    answer = ""
    for prompt in (os.environ["HARNESS_PROMPT"], os.environ["HARNESS_PROMPT_2"]):
        messages.append({"role": "user", "content": prompt})
        answer = run("main", messages, TOOLS)
    did("close", ctx="main")
    did("done", answer=answer)


main()
