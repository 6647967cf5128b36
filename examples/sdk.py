"""An agent written with the SDK: a helper on a fork, a compaction, and nothing of it stays in the cache.

With `make run` in another terminal: `.venv/bin/python examples/sdk.py`.
"""

import sys

from openai import OpenAI

import kvtether.http
from kvtether import Client, Context

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8700/v1"
model = OpenAI(base_url=URL, api_key="any", http_client=kvtether.http.client())
RULES = " ".join(f"Rule {i}: read before you write, and test what you wrote." for i in range(24))
DAY = " ".join(f"{i:03d} GET /items/{i * 37 % 101} 200 {i * 13 % 90} ms;" for i in range(24))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    """A call of the current context; its answer as it goes into the list."""
    reply = model.chat.completions.create(model="tiny", messages=messages, max_tokens=24)
    details = reply.usage.prompt_tokens_details
    print(f"  prompt of {reply.usage.prompt_tokens} tokens, {details.cached_tokens if details else 0} cached")
    return {"role": "assistant", "content": reply.choices[0].message.content or ""}


with Context(agent="analyst", client=Client(URL)) as ctx:
    messages = ctx.messages
    messages.append({"role": "system", "content": RULES})
    print("six days of logs")
    for day in range(6):
        messages.append(user(f"Day {day}: {DAY}"))
        messages.append(ask(messages))

    print("a helper begins with what the first three days said")
    with ctx.fork(7, agent="helper") as helper:
        helper.messages.append(user("Which path was slowest?"))
        ask(helper.messages)

    print("a summary takes the place of all but the rules")
    cost = ctx.before_edit(1, len(messages), 1)
    print(f"  {'?' if cost is None else cost} tokens of what stays would have to be prefilled again")
    with ctx.compact(1, len(messages)) as job:
        job.replace([ask([user("Sum up: " + " ".join(m["content"] for m in messages[1:]))])])

    messages.append(user("So, what was slow?"))
    ask(messages)
print("closed" if ctx.client.flush() else "no proxy to tell")
