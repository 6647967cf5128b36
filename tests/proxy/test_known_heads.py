"""Contexts that begin alike but for little: found, with what it costs; others are not compared."""

from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from engine_bridge.chunk_keys import chunk_keys
from engine_bridge.mapping.ranges import MappedPrompt
from lifecycle.core.ids import Namespace
from lifecycle.vocabulary import PrefixBreak
from proxy.followed_call import FollowedCall
from proxy.known_heads import HEADS_PER_SHAPE, KnownHeads
from proxy.lifecycle_fields import LifecycleFields
from proxy.tracked_call import CallRequest
from tests.proxy.conversations import chat, system, user
from tests.proxy.test_tracked_call import request
from tests.proxy.toy_model import CHUNK

RULES = "\n".join(f"Rule {number}: be good in way {number}." for number in range(40))


def asking(call: FollowedCall, tenant: str = "t", model: str = "m") -> CallRequest:
    return replace(request(LifecycleFields()), asked=call, tenant=tenant, namespace=Namespace(model))


def begins(dated: str, *, rules: str = RULES, tools: Any = None) -> FollowedCall:
    more = {"tools": tools} if tools else {}
    return chat([system(f"An agent.\nIt is {dated}.\n{rules}"), user("hi")], **more)


def mapped(call: FollowedCall) -> MappedPrompt:
    """One token a byte, head first."""
    parts = [repr(call.document.get("tools") or ""), *(m["content"] for m in call.document["messages"])]
    ids, ends = array("I"), []
    for part in parts:
        ids.extend(part.encode())
        ends.append(len(ids))
    return MappedPrompt(
        token_ids=ids,
        num_tokens=len(ids),
        num_kept_tokens=0,
        head_end=ends[0],
        message_ends=tuple(ends[1:]),
        tools_end=0,
        chunk_keys=chunk_keys(ids, CHUNK),
        chunk_tokens=CHUNK,
    )


def tool(name: str, text: str = "") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": text, "parameters": {}}}


def test_a_date_in_front_of_the_rules_costs_all_of_them() -> None:
    heads = KnownHeads()
    one, other = begins("2026-11-30 14:03"), begins("2026-11-30 14:04")
    assert heads.compared(asking(one), "first", mapped(one)) is None
    found = heads.compared(asking(other), "second", mapped(other))
    assert found is not None
    assert (found.uid, found.kind, found.index, found.role) == ("first", PrefixBreak.TIMESTAMP, 0, "system")
    texts = [call.document["messages"][0]["content"].encode() for call in (one, other)]
    begin = len(repr(""))
    same = next(n for n, (a, b) in enumerate(zip(*texts, strict=True)) if a != b) + begin
    whole = (len(texts[0]) + begin) // CHUNK * CHUNK
    assert (found.shared_tokens, found.lost_tokens) == (same // CHUNK * CHUNK, whole - same // CHUNK * CHUNK)
    assert heads.compared(asking(other), "third", mapped(other)) is None, "it shares with the second"


@pytest.mark.parametrize(
    "other",
    [
        asking(begins("now", rules=RULES), tenant="another"),
        asking(begins("now", rules=RULES), model="another"),
        asking(begins("now", rules=RULES.replace("good", "bad"))),
        asking(begins("now", rules=f"{RULES}\nOne more.\n")),
        asking(begins("now", tools=[tool("look")])),
        asking(chat([user("hi")])),
    ],
)
def test_what_is_another_prompt_or_anothers_is_not_compared(other: CallRequest) -> None:
    heads = KnownHeads()
    one = begins("then")
    heads.compared(asking(one), "first", mapped(one))
    assert heads.compared(other, "second", mapped(other.asked)) is None


def test_tools_in_another_order_and_with_another_word() -> None:
    heads = KnownHeads()
    tools = [tool("look", "See a file. " * 10), tool("change", "Change a file. " * 10)]
    one = begins("then", tools=tools)
    heads.compared(asking(one), "first", mapped(one))
    for uid, changed, kind in (
        ("second", tools[::-1], PrefixBreak.TOOLS_ORDER),
        ("third", [tool("look", "See nothing."), tools[1]], PrefixBreak.TOOLS),
    ):
        call = begins("then", tools=changed)
        found = heads.compared(asking(call), uid, mapped(call))
        assert found is not None
        assert (found.kind, found.index) == (kind, -1)
        assert found.lost_tokens > 0


def test_what_costs_nothing_is_nothing_and_what_is_not_mapped_costs_nobody_knows_what() -> None:
    heads = KnownHeads()
    end = begins("here", rules=f"{RULES}\nSession 3"), begins("here", rules=f"{RULES}\nSession 4")
    heads.compared(asking(end[0]), "first", mapped(end[0]))
    assert heads.compared(asking(end[1]), "second", mapped(end[1])) is None, "it ends in the same chunk"
    heads = KnownHeads()
    one, other = begins("step 3"), begins("step 4")
    heads.compared(asking(one), "first", None)
    found = heads.compared(asking(other), "second", None)
    assert found is not None
    assert (found.kind, found.lost_tokens) == (PrefixBreak.COUNTER, -1)


def test_what_stands_beside_the_messages_has_no_index() -> None:
    def call(dated: str) -> FollowedCall:
        given = begins("here")
        return replace(given, document={**given.document, "instructions": f"At {dated}.\n{RULES}"})

    heads = KnownHeads()
    heads.compared(asking(call("10:10")), "first", None)
    found = heads.compared(asking(call("10:11")), "second", None)
    assert found is not None
    assert (found.kind, found.index, found.role) == (PrefixBreak.TIMESTAMP, -1, "")


def test_memory_is_bounded_and_a_tenants_is_let_go() -> None:
    heads = KnownHeads(max_bytes=3 * len(RULES))
    for number in range(3 * HEADS_PER_SHAPE):
        call = begins(f"step {number}", rules=f"{RULES}{'x' * number}")
        heads.compared(asking(call, model=f"m{number % 3}"), f"c{number}", mapped(call))
        assert heads._size <= 3 * len(RULES) or len(heads._heads) == 1
    heads.forget_tenant("another")
    assert heads._heads
    heads.forget_tenant("t")
    assert (heads._size, heads._heads) == (0, {})
