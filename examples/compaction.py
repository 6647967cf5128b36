"""A tool-using agent compacts its context; the cache loses exactly the chunks that died with the old list.

With `make run` in another terminal: `.venv/bin/python examples/compaction.py`.
"""

import sys
import time

import httpx
from openai import OpenAI

DATA, ADMIN = sys.argv[1:3] or ("http://127.0.0.1:8700", "http://127.0.0.1:8701")
CTX = f"ticket-{time.time_ns()}"
RULES = " ".join(f"Rule {i}: read before you write, and test what you wrote." for i in range(24))
LOG = " ".join(f"{i:03d} GET /items/{i * 37 % 101} 200 {i * 13 % 90} ms;" for i in range(24))
TOOL = {"type": "function", "function": {"name": "read_log", "parameters": {"type": "object"}}}

agent = OpenAI(base_url=f"{DATA}/v1", api_key="any", default_headers={"x-kv-lifecycle": f'ctx="{CTX}"'})
admin = httpx.Client(base_url=f"{ADMIN}/kv/v1")


def turn(messages: list) -> str:
    reply = agent.chat.completions.create(model="tiny", messages=messages, tools=[TOOL], max_tokens=24)
    cached = reply.usage.prompt_tokens_details.cached_tokens
    print(f"  prompt of {reply.usage.prompt_tokens} tokens, {cached} of them cached")
    return reply.choices[0].message.content or ""


def alive() -> dict[str, list[str]]:
    """Chunk keys that the context refers to, each with what is known of it."""
    uid = admin.get("/contexts", params={"ctx": CTX}).json()["items"][0]["uid"]
    versions = admin.get(f"/contexts/{uid}").json()["versions"]
    return {chunk["key"]: chunk["flags"] for version in versions for chunk in version["chunks"]}


def gone() -> set[str]:
    """Chunk keys that were reclaimed, and that two lookups in the cache did not show any more."""
    applied = admin.get("/directives", params={"outcome": "applied"}).json()["items"]
    return {run[i : i + 64] for run in (d["result"]["gone"] for d in applied) for i in range(0, len(run), 64)}


print("12 turns with a tool")
history = [{"role": "system", "content": f"{CTX}. {RULES}"}, {"role": "user", "content": "What was slow?"}]
for n in range(12):  # no model decides anything here, so this script plays the part of calling the tool
    call = {"id": f"call_{n}", "type": "function", "function": {"name": "read_log", "arguments": "{}"}}
    history.append({"role": "assistant", "content": turn(history), "tool_calls": [call]})
    history.append({"role": "tool", "tool_call_id": call["id"], "content": f"Day {n}: {LOG}"})
while not all({"VERIFIED", "OURS"} <= set(flags) for flags in alive().values()):
    time.sleep(0.2)
before = set(alive())
print(f"  {len(before)} chunks of 64 tokens alive, each shown by the cache itself")
print(f"replace(1..{len(history)}, 1 summary)")
edit = {"op": "replace", "ctx": CTX, "seq": 1, "span": [1, len(history)], "n": 1}
httpx.post(f"{DATA}/kv/v1/ops", json={"source": "agent", "ops": [edit]}).raise_for_status()
dead = before - (kept := set(alive()))
while not dead <= gone():
    time.sleep(0.2)
print(f"  {len(kept)} alive, {len(dead)} dead; gone: {len(kept & gone())} alive, {len(dead & gone())} dead")
print("the next call")
turn([history[0], {"role": "user", "content": "Summary: 12 days read, all above 80 ms is slow."}])
