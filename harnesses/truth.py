"""What a harness really did: which of its contexts made each request, and how each list came from the last.

Whose a request is: the driver's own header, else the ids that the harness sends, else the words of the
scripted model, which knows its own tasks. How a list came about is read from the tokens.
"""

import json
from array import array
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from harnesses.model_server import TRUTH_HEADER, Exchange
from harnesses.wire import Answer

GENERATION_PROMPT_TOKENS = 8
"""What a prompt ends with that the next does not repeat if the answer was dropped: at most so much."""

ONE_OFF_KINDS = ("summary", "title", "probe")


class Relation(StrEnum):
    """How a request's list stands to what its context, or another one, had before."""

    NEW = "new"
    APPEND = "append"
    EDIT = "edit"
    FORK = "fork"
    ONE_OFF = "one-off"
    COMPACTION = "compaction"
    SUBAGENT = "subagent"


class TrueRequest(msgspec.Struct, frozen=True):
    """A request and the truth of it. `before` is the one whose list it goes on with, or was made beside."""

    exchange: Exchange
    ctx: str
    relation: Relation
    before: Exchange | None = None

    @property
    def one_off(self) -> bool:
        return self.relation is Relation.ONE_OFF


class Did(msgspec.Struct, frozen=True):
    """A line of the truth file."""

    did: str
    told: dict[str, Any]

    @property
    def ctx(self) -> str:
        return str(self.told.get("ctx", ""))


def read_truth(path: Path) -> list[Did]:
    """What the driver wrote, as far as it got; a line that was cut off is left out."""
    lines: list[Did] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and isinstance(told.get("did"), str):
            lines.append(Did(told["did"], told))
    return lines


def true_requests(exchanges: Iterable[Exchange]) -> list[TrueRequest]:
    """The truth of every inference, in the order in which they came."""
    last: dict[str, Exchange] = {}
    summaries: dict[str, str] = {}
    found = []
    for exchange in exchanges:
        if exchange.answer is None or exchange.computed is None:
            continue
        told, *keys = (part.strip() for part in exchange.header(TRUTH_HEADER).split(";"))
        said = dict(key.split("=", 1) for key in keys if "=" in key)
        ctx = told or _own_id(exchange) or exchange.answer.reply.task_id
        parent = said.get("parent", ctx.rpartition(".")[0])
        before = last.get(ctx)
        relation = _told(said.get("relation", "")) or _relation(exchange, ctx, before, summaries.get(ctx, ""))
        if relation is Relation.ONE_OFF:
            of = said.get("parent", ctx)
            if exchange.answer.reply.kind == "summary":
                summaries[of] = _telling(exchange.answer)
            found.append(TrueRequest(exchange, ctx, relation, last.get(of)))
            continue
        if relation is Relation.COMPACTION:
            summaries.pop(ctx, None)
        if before is None:
            before = last.get(parent) if relation is Relation.FORK else None
        found.append(TrueRequest(exchange, ctx, relation, before))
        last[ctx] = exchange
    return found


def _own_id(exchange: Exchange) -> str:
    """Which conversation the harness itself says it is: Codex, Claude Code, opencode."""
    thread = exchange.header("thread-id")
    if thread:
        return thread
    session = exchange.header("x-claude-code-session-id")
    if session:
        agent = exchange.header("x-claude-code-agent-id")
        return f"{session}:{agent}" if agent else session
    return exchange.header("x-session-id")


def _told(name: str) -> Relation | None:
    return next((each for each in Relation if each == name), None)


def _relation(exchange: Exchange, ctx: str, before: Exchange | None, summary: str) -> Relation:
    assert exchange.answer is not None
    if exchange.answer.reply.kind in ONE_OFF_KINDS:
        return Relation.ONE_OFF
    if before is None:
        return Relation.SUBAGENT if "." in exchange.answer.reply.task_id else Relation.NEW
    if not is_edit(before, exchange):
        return Relation.APPEND
    compacted = summary and summary in json.dumps(exchange.body, ensure_ascii=False)
    return Relation.COMPACTION if compacted else Relation.EDIT


def _telling(answer: Answer) -> str:
    """What of a summary can be found again, however it is quoted."""
    return answer.reply.text.replace("<summary>", "").strip()[:40]


def is_edit(before: Exchange, after: Exchange) -> bool:
    """Whether the later list does not merely go on with the earlier: by tokens, which is what is cached."""
    assert before.computed is not None
    assert after.computed is not None
    shared = common_prefix(before.computed.prompt, after.computed.prompt)
    return shared < len(before.computed.prompt) - GENERATION_PROMPT_TOKENS


def common_prefix(one: "array[int]", other: "array[int]") -> int:
    """How many tokens two prompts share from the start."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def contexts(requests: Sequence[TrueRequest]) -> dict[str, list[TrueRequest]]:
    """The requests of each context that lasts, one-offs apart."""
    found: dict[str, list[TrueRequest]] = {}
    for each in requests:
        if not each.one_off:
            found.setdefault(each.ctx, []).append(each)
    return found
