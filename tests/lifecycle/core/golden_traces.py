"""Golden traces: lives of contexts, observation by observation, with what was decided and what was true then.

`python -m tests.golden` rewrites those it knows, in `tests/traces`; a trace that it does not know any more
stays for ever, for logs hold such lives. A line is one observation of one context.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from lifecycle.core.decide import decide, open_context
from lifecycle.core.digest import digest
from lifecycle.core.events import ContextEvent
from lifecycle.core.evolve import evolve
from lifecycle.core.observations import (
    AppendMessages,
    CallArrival,
    CallEnding,
    CallMapping,
    CloseContext,
    CloseRequested,
    ContextOpened,
    DeclareOutcome,
    DeclareWaiting,
    FirstToken,
    GenerationKeys,
    OperationReceived,
    PinSpan,
    RemoveMessages,
    ReplaceMessages,
    Tick,
    UnpinSpan,
    VerificationResult,
)
from lifecycle.core.state import ContextState
from lifecycle.vocabulary import CallEnd, OutcomeResult, WaitKind
from tests.lifecycle.core.story import Story, pin

TRACES = Path(__file__).parents[2] / "traces"

OBSERVATIONS = {
    kind.__name__: kind
    for kind in (
        CallArrival,
        CallEnding,
        CallMapping,
        CloseRequested,
        ContextOpened,
        FirstToken,
        GenerationKeys,
        OperationReceived,
        Tick,
        VerificationResult,
    )
}


def agent_then_replace() -> list[Story]:
    """Twelve turns with tools, then the first eight messages are compacted into one."""
    story = Story()
    words = ["s0", "u0"]
    for turn in range(12):
        call = f"c{turn}"
        story.arrive(" ".join(words), call, source="sdk", seq=story.seqs)
        story.map(call)
        story.first(call)
        story.generate(f"a{turn}", call)
        story.end(call, wait=WaitKind.TOOL)
        story.do(DeclareWaiting, kind=WaitKind.TOOL, tool="bash", eta=2.0)
        story.tick(2)
        words += [f"a{turn}", f"t{turn}"]
        story.do(AppendMessages, n=2)
    story.do(ReplaceMessages, span=(1, 9), n=1)
    words[1:9] = ["u9"]
    story.call(" ".join(words), "c12", source="sdk", seq=story.seqs)
    story.do(CloseContext)
    return [story]


def concurrent_branches() -> list[Story]:
    """Three calls at once behind one list; the middle one goes on, the others end."""
    story = Story()
    story.call("s0 u1")
    for i in (1, 2, 3):
        story.arrive(f"s0 u1 u{i + 3}", f"b{i}")
    for i in (2, 1, 3):
        story.map(f"b{i}")
        story.first(f"b{i}")
    for i in (3, 1, 2):
        story.generate(f"a{i}", f"b{i}")
        story.end(f"b{i}")
    story.call("s0 u1 u5 a2 u7", "c2")
    story.call("s0 u1 u5 a2 u7 a3 u8", "c3")
    return [story]


def undeclared_edit_and_return() -> list[Story]:
    """The list changes unannounced, the old one comes back, and at last it does not."""
    story = Story()
    story.call("s0 u1 a1 u2")
    story.call("s0 u1 a9", "c2")
    story.call("s0 u1 a1 u2 a3", "c3")
    story.tick(61)
    story.arrive("s0 u1 a1 u2 a3 u4", "c4")
    story.first("c4")
    story.map("c4", stripped=["a1"])
    story.end("c4")
    story.tick(30 * 60)
    return [story]


def forks_and_one_offs() -> list[Story]:
    """A child goes its own way, a one-off summarises, the parent closes."""
    mother = Story()
    mother.call("s0 u1")
    mother.arrive("s0 u1 a1 u2", "c2")
    mother.map("c2")
    child = Story(parent=mother, fork=True)
    mother.first("c2")
    mother.end("c2")
    child.call("s0 u1 u9")
    child.tick(3600)
    return [mother, child]


def pins_that_follow() -> list[Story]:
    """Pins through declared and undeclared changes of their prefix, and past the close."""
    story = Story()
    story.call("s0 u1 a1 t1", pins=(pin("system", 3600.0),))
    story.do(PinSpan, span=(0, 3), ttl=900.0)
    story.do(PinSpan, span=(0, 3), ttl=1200.0)
    story.do(RemoveMessages, span=(1, 2))
    story.call("s0 a1 t1", "c2")
    story.call("s0 u5 a1 t1", "c3")
    story.do(UnpinSpan, span=(0, 1))
    story.close()
    story.tick(1300)
    return [story]


def retries_and_aborts() -> list[Story]:
    """Attempts that fail early, fail late, overlap; two choices; an operation that is lost."""
    story = Story()
    story.call("s0 u1")
    story.arrive("s0 u1 a1 u2", "c2", num_choices=2)
    story.map("c2")
    story.end("c2", end=CallEnd.FAILED)
    story.arrive("s0 u1 a1 u2", "c2", num_choices=2)
    story.map("c2", 2)
    story.first("c2", 2)
    story.generate("a5", "c2", 2)
    story.abort("c2", 2)
    for attempt in (3, 4):
        story.arrive("s0 u1 a1 u2", "c2", num_choices=2)
        story.map("c2", attempt)
    for attempt in (4, 3):
        story.first("c2", attempt)
        story.generate("a6", "c2", attempt, 0)
        story.generate("a7", "c2", attempt, 1)
        story.end("c2", attempt)
    story.do(DeclareOutcome, 3, span=(2, 4), result=OutcomeResult.VERIFIED)
    story.tick(6)
    story.verify("the cache holds other keys")
    story.call("s0 u1 a1 u2 a6 u3", "c3")
    story.verify()
    return [story]


SCRIPTS: tuple[Callable[[], list[Story]], ...] = (
    agent_then_replace,
    concurrent_branches,
    undeclared_edit_and_return,
    forks_and_one_offs,
    pins_that_follow,
    retries_and_aborts,
)


def file_of(script: Callable[[], list[Story]]) -> Path:
    """Where the script's trace lies."""
    return TRACES / f"{script.__name__}.jsonl"


def told(stories: list[Story]) -> Iterator[dict[str, Any]]:
    """The lines of a trace, context by context; a fork says how many its parent had by then."""
    for story in stories:
        yield line(story.opened, story.events[:1], evolve(None, story.events[0]), story)
        for observation, events, state in story.steps:
            yield line(observation, events, state, story)


def line(observation: Any, events: list[ContextEvent], state: ContextState, story: Story) -> dict[str, Any]:
    """One observation, what was decided, and the digest of what was true then."""
    return {
        "context": story.state.uid,
        "after": story.parent_steps,
        "type": type(observation).__name__,
        "observation": json.loads(msgspec.json.encode(observation)),
        "events": [json.loads(msgspec.json.encode(e)) for e in events],
        "digest": digest(state).hex(),
    }


def lived(lines: list[dict[str, Any]]) -> Iterator[tuple[list[Any], str]]:
    """Live a trace again: the events and the digest that each of its observations leads to now."""
    states: dict[str, list[ContextState]] = {}
    for told_line in lines:
        kind = OBSERVATIONS[told_line["type"]]
        observation: Any = msgspec.json.decode(json.dumps(told_line["observation"]), type=kind)
        history = states.setdefault(told_line["context"], [])
        if isinstance(observation, ContextOpened):
            parent = states[observation.parent][told_line["after"]] if observation.parent else None
            events = open_context(observation, parent)
            state = evolve(None, events[0])
        else:
            state = history[-1]
            events = decide(state, observation)
            for event in events:
                state = evolve(state, event)
        history.append(state)
        yield [json.loads(msgspec.json.encode(e)) for e in events], digest(state).hex()


def main() -> None:
    """Rewrite the traces."""
    TRACES.mkdir(exist_ok=True)
    for script in SCRIPTS:
        text = "".join(json.dumps(x) + "\n" for x in told(script()))
        file_of(script).write_text(text)


if __name__ == "__main__":
    main()
