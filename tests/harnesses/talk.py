"""Requests as agents send them, and a conversation with the scripted model that needs no server."""

from typing import Any

from harnesses.conversation import CHAT, Asked, read_request
from harnesses.script import Reply, reply_to
from harnesses.wire import new_answer

Message = dict[str, Any]


def schema(argument: str) -> dict[str, Any]:
    return {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}


def tool(name: str, argument: str) -> Message:
    return {"type": "function", "function": {"name": name, "parameters": schema(argument)}}


TOOLS = [tool("shell", "command"), tool("read_file", "path"), tool("task", "prompt")]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def asked(messages: list[Message], tools: list[Message] | None = None, **body: Any) -> Asked:
    given = {"messages": messages, **({"tools": tools} if tools else {}), **body}
    return read_request(CHAT, given)


def said(messages: list[Message], tools: list[Message] | None = None, **body: Any) -> Reply:
    return reply_to(asked(messages, tools, **body))


def turn(messages: list[Message], tools: list[Message]) -> list[Message]:
    """The next turn of a conversation: the model's message, and a result of each of its calls."""
    message = new_answer("a-", "call-", said(messages, tools), "m", 0).chat_message()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "nothing"}
        for call in message.get("tool_calls", ())
    ]
    return [message, *results]


def whole(task: str, tools: list[Message], limit: int = 30) -> list[list[Message]]:
    """Every turn of a task until its answer."""
    turns = [[user(task)]]
    for _ in range(limit):
        turns.append(turn([each for done in turns for each in done], tools))
        if len(turns[-1]) == 1:
            return turns
    raise AssertionError("the task does not end")
