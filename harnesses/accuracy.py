"""`python -m harnesses.accuracy DIR [--half tuning | scoring] [--wrong]`: how well contexts are recognised.

Replays recordings (`--record`) through the proxy's own recognition, in the order in which requests and their
answers were seen: once with the bodies alone, once with the headers that each harness sends. Rules may be
tuned on the harnesses of one half only, and are scored on those of the other, which no rule has seen.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from harnesses.truth import Relation as Truth
from proxy.answer_facts import AnswerFacts, ChoiceFact, ToolCallFact
from proxy.call_readers import READERS, parse_calls
from proxy.context_finder import ContextFinder
from proxy.followed_call import FollowedCall, MessageHasher, NotFollowed
from proxy.harness_identity import NOTHING_SAID, HarnessCall, read_harness_call
from proxy.identity import Identity, LineageIndex
from proxy.known_lists import Relation
from proxy.lifecycle_fields import LifecycleFields
from proxy.response_chains import ResponseChains

HALVES = ("tuning", "scoring")

TUNED_ON = frozenset(
    {
        *("plain-append", "plain-summary", "plain-delegate", "plain-retry", "plain-clock"),
        *("codex", "opencode", "langchain", "openai-agents", "smolagents", "google-adk"),
    }
)
"""Harnesses whose recordings rules may be tuned on. Laid down before any rule was; the rest is scored."""

_GUESS = {
    Relation.CONTINUES: Truth.APPEND,
    Relation.RETRIES: Truth.APPEND,
    Relation.EDITS: Truth.EDIT,
    Relation.FORKS: Truth.FORK,
    Relation.COMPACTS: Truth.COMPACTION,
    Relation.ONE_OFF: Truth.ONE_OFF,
    Relation.SUBAGENT: Truth.SUBAGENT,
    Relation.UNRELATED: Truth.NEW,
}


class Recorded(msgspec.Struct, kw_only=True):
    """A line of a recording, as far as it is needed."""

    number: int
    at: float
    answered_at: float
    path: str
    headers: list[tuple[str, str]]
    body: Any
    answer: Any = None
    ctx: str = ""
    relation: Truth = Truth.NEW
    before: int | None = None


class Judged(msgspec.Struct, frozen=True):
    """One request: what it was, what it was taken for, and whether it was given to the right context."""

    run: Path
    number: int
    truth: Truth
    guess: Truth
    right_context: bool
    why: str


class Score:
    """Requests judged, of any number of runs."""

    def __init__(self) -> None:
        self.judged: list[Judged] = []

    @property
    def right_contexts(self) -> int:
        return sum(each.right_context for each in self.judged)

    def table(self) -> Iterable[str]:
        """The confusion table in Markdown: a row a truth, a column a guess."""
        cells = Counter((each.truth, each.guess) for each in self.judged)
        kinds = list(Truth)
        yield f"| it was \\ taken for | {' | '.join(kinds)} | right |"
        yield "|---" * (len(kinds) + 2) + "|"
        for truth in kinds:
            row = [cells[truth, guess] for guess in kinds]
            total = sum(row)
            share = f"{cells[truth, truth] / total:.2f}" if total else "-"
            yield f"| {truth} | {' | '.join(str(n or '') for n in row)} | {share} |"


def half_of(harness: str) -> str:
    """Which half a harness is in."""
    return "tuning" if harness in TUNED_ON else "scoring"


def replay(run: Path, with_headers: bool) -> list[Judged]:
    """Judge each request of a recording."""
    requests = [msgspec.json.decode(line, type=Recorded) for line in run.read_bytes().splitlines()]
    moments = [(each.at, 1, each) for each in requests if each.path in READERS]
    moments += [(each.answered_at, 0, each) for each in requests if each.answered_at and each.path in READERS]
    replayed = _Replay(run, with_headers)
    for _, begins, request in sorted(moments, key=lambda moment: (moment[0], moment[1], moment[2].number)):
        if begins:
            replayed.asked(request)
        else:
            replayed.answered(request)
    return replayed.judged


class _Replay:
    """One run under way. `given` says for each true context what its last call was given to."""

    def __init__(self, run: Path, with_headers: bool) -> None:
        self.judged: list[Judged] = []
        self._run = run
        self._with_headers = with_headers
        hasher = MessageHasher(b"a key for replays")
        self._hasher = hasher
        self._finder = ContextFinder(LineageIndex(), hasher)
        self._chains = ResponseChains(hasher)
        self._names = count(1)
        self._flying: dict[int, tuple[Identity, FollowedCall]] = {}
        self._given: dict[str, str] = {}
        self._owners: dict[str, str] = {}

    def asked(self, request: Recorded) -> None:
        """A request comes."""
        try:
            [asked] = parse_calls(request.path, json.dumps(request.body).encode(), self._hasher)
        except (NotFollowed, ValueError):
            return
        asked = self._chains.resolved("t", asked)
        said = self._said(request)
        identity = self._finder.find("t", LifecycleFields(), asked, said)
        name = identity.context_id or f"ctx-{next(self._names)}"
        identity = msgspec.structs.replace(identity, context_id=name)
        self._finder.given("t", identity, str(request.number), asked, said)
        self._flying[request.number] = identity, asked
        self._judge(request, identity)

    def _said(self, request: Recorded) -> HarnessCall:
        if not self._with_headers:
            return NOTHING_SAID
        headers = [(name.lower().encode(), value.encode()) for name, value in request.headers]
        return read_harness_call(headers, request.body)

    def _judge(self, request: Recorded, identity: Identity) -> None:
        """A one-off may be beside anything, but no turn of anybody; a turn is of the context that its true
        context's turns before were given to; what is new is given to nobody's."""
        name, truth = identity.context_id, request.relation
        owner = self._owners.get(name)
        if truth is Truth.ONE_OFF:
            right = owner is None
            self._owners.setdefault(name, f"one-off {request.number}")
        else:
            expected = self._given.get(request.ctx)
            right = not identity.one_off and (owner is None if expected is None else name == expected)
            if not identity.one_off:
                self._given[request.ctx] = name
                self._owners.setdefault(name, request.ctx)
        why = f"{identity.rung}: {identity.reason}"
        guess = _GUESS[identity.relation]
        self.judged.append(Judged(self._run, request.number, truth, guess, right, why))

    def answered(self, request: Recorded) -> None:
        """A request is answered."""
        flying = self._flying.pop(request.number, None)
        if flying is None:
            return
        identity, asked = flying
        facts = _facts(request.answer) if isinstance(request.answer, dict) else None
        self._finder.answered("t", identity, str(request.number), asked, facts)
        if facts is not None:
            self._chains.remember("t", asked, facts)


def _facts(answer: dict[str, Any]) -> AnswerFacts:
    calls = tuple(
        ToolCallFact(each["id"], each["function"]["name"], each["function"]["arguments"])
        for each in answer.get("tool_calls") or ()
    )
    content = answer.get("content")
    text = content if isinstance(content, str) else ""
    choice = ChoiceFact(index=0, content=content, tool_calls=calls)
    return AnswerFacts(
        response_id=str(answer.get("id", "")), choices=(choice,), answer_texts=(text,) if text else ()
    )


def runs_in(folder: Path, half: str) -> dict[str, list[Path]]:
    """Recordings by harness, those of one half or of both."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*/*.jsonl")):
        if not half or half_of(path.parent.name) == half:
            found.setdefault(path.parent.name, []).append(path)
    return found


def report(folder: Path, half: str, wrong: bool) -> Iterable[str]:
    """What is printed: for bodies alone and with headers, a line a harness and a confusion table."""
    runs = runs_in(folder, half)
    for with_headers in (False, True):
        total = Score()
        yield f"\n### {'With the headers harnesses send' if with_headers else 'Bodies alone'}\n"
        yield "| harness | half | runs | requests | right context | right kind |"
        yield "|---|---|---|---|---|---|"
        for harness, paths in runs.items():
            score = Score()
            for path in paths:
                score.judged += replay(path, with_headers)
            total.judged += score.judged
            yield f"| {harness} | {half_of(harness)} | {len(paths)} | {_shares(score.judged)} |"
        yield f"| all | | {sum(map(len, runs.values()))} | {_shares(total.judged)} |\n"
        yield from total.table()
        for each in total.judged if wrong else ():
            if not each.right_context or each.guess is not each.truth:
                where = f"{each.run.parent.name}/{each.run.stem}#{each.number}"
                context = "" if each.right_context else " WRONG CONTEXT"
                yield f"{where}: {each.truth} taken for {each.guess}{context} ({each.why})"


def _shares(judged: Sequence[Judged]) -> str:
    total = len(judged)
    if not total:
        return "0 | - | -"
    contexts = sum(each.right_context for each in judged)
    kinds = sum(each.guess is each.truth for each in judged)
    return f"{total} | {contexts / total:.3f} | {kinds / total:.3f}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", choices=HALVES, default="")
    parser.add_argument("--wrong", action="store_true", help="list every request that was judged wrongly")
    given = parser.parse_args()
    for line in report(given.folder, given.half, given.wrong):
        print(line)


if __name__ == "__main__":
    main()
