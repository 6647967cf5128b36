"""What it costs to tell whose a call is: `python -m bench.recognition [--repeats 200]`.

Microseconds of processor time a call, on the event loop, beyond reading its body, until it may leave: the
ladder, lineage and inference, with what is remembered for the next call. Agents with tools whose lists grow
by a tool call and its result of 2 KiB a turn, among 200 other contexts; and lists that are nobody's yet.
Median and 99th percentile; `after` is the median of what its answer costs, which nobody waits for.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import msgspec

from proxy.answer_facts import AnswerFacts, ChoiceFact, ToolCallFact
from proxy.call_readers import parse_calls
from proxy.context_finder import ContextFinder
from proxy.followed_call import FollowedCall, MessageHasher
from proxy.harness_identity import read_harness_call
from proxy.identity import LineageIndex
from proxy.lifecycle_fields import LifecycleFields

Message = dict[str, Any]
Times = list[tuple[float, float]]
TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}]
OTHERS = 200
LENGTHS = (10, 100, 1000)
RESULT_LINES = 40
NOBODY: Mapping[str, str] = {}

_numbers = count(1)


def _text(lines: int) -> str:
    return "\n".join(f"line {next(_numbers)} of what a command printed when it ran" for _ in range(lines))


def _turn() -> list[Message]:
    call_id = f"call_{next(_numbers):012x}"
    function = {"name": "shell", "arguments": json.dumps({"command": _text(1)})}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return [
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call_id, "content": _text(RESULT_LINES)},
    ]


def _history(num_messages: int) -> list[Message]:
    messages: list[Message] = [
        {"role": "system", "content": "You run commands."},
        {"role": "user", "content": _text(3)},
    ]
    while len(messages) < num_messages:
        messages += _turn()
    return messages


class _Proxy:
    """The part of it that is measured. Its hasher reads bodies outside of what is timed."""

    def __init__(self) -> None:
        self.hasher = MessageHasher(b"bench")
        self.finder = ContextFinder(LineageIndex(), self.hasher)

    def read(self, messages: list[Message], **fields: Any) -> FollowedCall:
        body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
        [call] = parse_calls("/v1/chat/completions", body, self.hasher)
        return call

    def take(self, call: FollowedCall, headers: Mapping[str, str]) -> tuple[float, float]:
        """One call from arrival to answer; microseconds until it may leave, and at its answer."""
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        began = time.thread_time_ns()
        said = read_harness_call(raw, call.document)
        identity = self.finder.find("t", LifecycleFields(), call, said)
        number = str(next(_numbers))
        identity = msgspec.structs.replace(identity, context_id=identity.context_id or f"ctx-{number}")
        self.finder.given("t", identity, number, call, said)
        took = time.thread_time_ns() - began
        began = time.thread_time_ns()
        self._answer(identity, number, call)
        return took / 1_000, (time.thread_time_ns() - began) / 1_000

    def _answer(self, identity: Any, number: str, call: FollowedCall) -> None:
        """As the client's next list will show it."""
        following = call.document.get("next")
        if isinstance(following, dict):
            calls = tuple(
                ToolCallFact(c["id"], c["function"]["name"], c["function"]["arguments"])
                for c in following["tool_calls"]
            )
            choice = ChoiceFact(index=0, tool_calls=calls)
        else:
            choice = ChoiceFact(index=0, content=_text(3))
        self.finder.answered("t", identity, number, call, AnswerFacts(choices=(choice,)))


def _going_on(proxy: _Proxy, length: int, repeats: int, headers: Mapping[str, str]) -> Times:
    """Turns of one agent, each measured, once its list has that length."""
    messages = _history(length)
    following = _turn()
    proxy.take(proxy.read(messages, tools=TOOLS, next=following[0]), headers)
    found = []
    for _ in range(repeats):
        messages = [*messages, *following]
        following = _turn()
        found.append(proxy.take(proxy.read(messages, tools=TOOLS, next=following[0]), headers))
    return found


def _new(proxy: _Proxy, length: int, repeats: int) -> Times:
    """Lists that go on with nobody's."""
    return [proxy.take(proxy.read(_history(length), tools=TOOLS), NOBODY) for _ in range(repeats)]


def _one_off(proxy: _Proxy, length: int, repeats: int) -> Times:
    """Transcripts of an agent's list, in one message without tools."""
    found = []
    for _ in range(repeats):
        messages = _history(length)
        proxy.take(proxy.read(messages, tools=TOOLS), NOBODY)
        transcript = "\n".join(f"{m['role']}: {m['content']}" for m in messages)
        asked = [{"role": "user", "content": f"Sum it up:\n{transcript}"}]
        found.append(proxy.take(proxy.read(asked), NOBODY))
    return found


def measure(repeats: int) -> None:
    """Print the table."""
    named = {"x-session-id": "ses_1"}
    cases: dict[str, Callable[[_Proxy, int, int], Times]] = {
        "a turn, by its messages": lambda proxy, length, n: _going_on(proxy, length, n, NOBODY),
        "a turn, by its harness' header": lambda proxy, length, n: _going_on(proxy, length, n, named),
        "a new list": _new,
        "a transcript of one": _one_off,
    }
    print("| call | messages | µs p50 | µs p99 | after |\n|---|---|---|---|---|")
    for name, case in cases.items():
        for length in LENGTHS:
            proxy = _Proxy()
            _new(proxy, 6, OTHERS)
            found = case(proxy, length, max(20, repeats // (1 + length // 100)))
            before = sorted(each for each, _ in found)
            p99 = before[min(len(before) - 1, int(len(before) * 0.99))]
            after = statistics.median(each for _, each in found)
            print(
                f"| {name} | {length} | {statistics.median(before):.0f} | {p99:.0f} | {after:.0f} |",
                flush=True,
            )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} before\n")
    measure(given.repeats)


if __name__ == "__main__":
    main()
