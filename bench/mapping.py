"""CPU time to map a prompt: an appended tool turn, a new user turn, a cold context.

`python -m bench.mapping [--tokenizers DIR] [--seconds S]` prints one table. Times are of this process,
medians over repetitions, warm-up excluded; `parse` (the request body's JSON) is given apart, for the proxy
does it once for everything. The naive path is what an engine does: parse nothing anew, render the whole
list with plain Jinja, encode all of it, hash all of it.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.mapping.environment import ChatEnvironment
from engine_bridge.mapping.mapper import ChatMapper, MappingState
from engine_bridge.mapping.model_profile import ModelProfile
from engine_bridge.mapping.prompts import ChatPrompt
from engine_bridge.mapping.tokens import TextTokenizer

WORDS = [
    "the",
    "file",
    "error",
    "line",
    "return",
    "value",
    "index",
    "cache",
    "token",
    "build",
    "test",
    "module",
    "server",
    "request",
    "path",
    "import",
    "class",
    "def",
    "async",
    "await",
    "0x7f3a",
    "{}",
    "[]",
    "=>",
    "result",
    "=",
    "None;",
    "/usr/lib",
    "json",
    "true",
    "false",
    "3.1415",
    "--",
    "##",
    "TODO_list",
    "user_id",
    "commit",
]
TURN_TOKENS = 900
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something in the workspace",
            "parameters": {"type": "object", "properties": {"argument": {"type": "string"}}},
        },
    }
    for name in ("shell", "read_file", "write_file", "search")
]


class Shape(msgspec.Struct, frozen=True):
    """A conversation to build: prompt tokens aimed at, words of one tool result."""

    tokens: int
    words: int


def text(rng: random.Random, words: int) -> str:
    lines = [" ".join(rng.choices(WORDS, k=min(12, words - at))) for at in range(0, words, 12)]
    return "\n".join(lines)


def tool_turn(rng: random.Random, number: int, words: int) -> list[dict[str, Any]]:
    call = f"call{number:08d}"
    arguments = json.dumps({"argument": text(rng, max(4, words // 12))})
    function = {"name": "shell", "arguments": arguments}
    return [
        {
            "role": "assistant",
            "content": text(rng, max(4, words // 10)),
            "tool_calls": [{"id": call, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call, "content": text(rng, words)},
    ]


def conversation(rng: random.Random, shape: Shape, tokenizer: TextTokenizer) -> list[dict[str, Any]]:
    """An agent's list: system, then a user message and a run of tool turns, again and again."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(rng, 300)}]
    total, number = 0, 0
    while total < shape.tokens:
        if number % 40 == 0:
            turn = [{"role": "user", "content": text(rng, 60)}]
        else:
            turn = tool_turn(rng, number, shape.words)
        messages += turn
        total += sum(len(tokenizer.encode(json.dumps(message))) for message in turn)
        number += 1
    return messages


def cpu_ms(run: Callable[[], object]) -> float:
    start = time.process_time_ns()
    run()
    return (time.process_time_ns() - start) / 1e6


def measure(
    run: Callable[[], Callable[[], object]], repeat: int, deadline: float
) -> tuple[float, float, int]:
    """Median, spread (10th to 90th percentile) and number of runs; `run` sets one up and gives what is
    timed.
    """
    cpu_ms(run())
    times: list[float] = []
    while len(times) < repeat and (time.monotonic() < deadline or len(times) < 3):
        times.append(cpu_ms(run()))
    times.sort()
    low, high = times[len(times) // 10], times[-1 - len(times) // 10]
    return statistics.median(times), high - low, len(times)


def naive(mapper: ChatMapper, state: MappingState, prompt: ChatPrompt) -> Callable[[], object]:
    prepared = mapper.prepare(prompt, state.clone())
    template = ChatEnvironment().from_string(prepared.facts.source)
    given = prepared.given

    def run() -> bytes:
        rendered = template.render(**given.kwargs, messages=given.conversation, tools=given.tools)
        return chunk_keys(mapper.profile.tokenizer.encode(rendered))

    return run


def row(
    label: str, mapper: ChatMapper, state: MappingState, prompt: ChatPrompt, deadline: float, cold: bool
) -> str:
    def incremental() -> Callable[[], object]:
        twin = MappingState() if cold else state.clone()
        return lambda: mapper.map(prompt, twin)

    body = msgspec.json.encode({"messages": prompt.messages, "tools": prompt.tools})
    parse, _, _ = measure(lambda: lambda: msgspec.json.decode(body), 5, deadline)
    full, _, _ = measure(lambda: naive(mapper, state, prompt), 3, deadline)
    mapped = mapper.map(prompt, MappingState() if cold else state.clone())
    took, spread, runs = measure(incremental, 3 if cold else 25, deadline)
    new = mapped.num_tokens - (0 if cold else mapped.num_kept_tokens)
    return (
        f"{label:<34}{mapped.num_tokens:>8}{len(prompt.messages):>6}{new:>8}{parse:>8.2f}{took:>10.2f}"
        f"{spread:>8.2f}{full:>10.1f}{full / took:>8.1f}{runs:>6}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizers", type=Path, default=Path(".engine/npm"))
    parser.add_argument("--models", default="qwen3,llama3_1,deepseek_v3")
    parser.add_argument("--seconds", type=float, default=240.0, help="bound on the whole run")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    print(
        f"{'case':<34}{'tokens':>8}{'msgs':>6}{'new':>8}{'parse':>8}{'cpu ms':>10}{'spread':>8}"
        f"{'naive':>10}{'ratio':>8}{'runs':>6}"
    )
    models = options.models.split(",")
    shapes = [Shape(8_000, 300), Shape(64_000, 300), Shape(256_000, 300), Shape(256_000, 130)]
    cases = len(models) * len(shapes)
    for number, (model, shape) in enumerate((model, shape) for model in models for shape in shapes):
        left = end - time.monotonic()
        if left <= 0:
            print(f"{model}: out of time")
            break
        deadline = time.monotonic() + left / (cases - number)
        profile = ModelProfile.load(options.tokenizers / model / "models", model)
        mapper = ChatMapper(profile)
        rng = random.Random(shape.tokens + shape.words)
        messages = conversation(rng, shape, profile.tokenizer)
        state = MappingState()
        base = ChatPrompt(messages=messages, tools=TOOLS)
        mapper.map(base, state)
        turn = tool_turn(rng, 99_999_999, TURN_TOKENS // 2)
        user = [{"role": "assistant", "content": text(rng, 60)}, {"role": "user", "content": text(rng, 200)}]
        name = f"{model} {shape.tokens // 1000}K/{shape.words}w"
        for label, added, cold in (
            ("tool turn", turn, False),
            ("user turn", user, False),
            ("cold", turn, True),
        ):
            prompt = ChatPrompt(messages=json.loads(json.dumps(messages + added)), tools=TOOLS)
            print(row(f"{name} {label}", mapper, state, prompt, deadline, cold), flush=True)
        print(f"{'':<34}state {state.size_bytes / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
