"""Are our tokens the engine's? Probe conversations, compared id by id with its `/tokenize`."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from engine_bridge.errors import RejectedByEngine, TemplateMismatch, Unmappable
from engine_bridge.mapping.mapper import ChatMapper
from engine_bridge.mapping.prompts import ChatPrompt

Tokenize = Callable[[dict[str, Any]], Awaitable[Sequence[int]]]
"""Posts a body to the engine's `/tokenize` and answers its `tokens`. Raises `RejectedByEngine` for a 400."""


class Probe(msgspec.Struct, frozen=True):
    """A conversation whose tokens tell one way of rendering from another. `body` fits `/tokenize` and chat
    requests.
    """

    name: str
    body: dict[str, Any]


class Verification(msgspec.Struct, frozen=True):
    """Probes whose ids were equal, those that the engine and we both refuse, and those that we do not map."""

    fingerprint: str
    compared: tuple[str, ...]
    refused: tuple[str, ...]
    unmapped: tuple[str, ...]


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": 'Look a <word> up & quote "it" – même en français',
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}},
                "required": ["word"],
            },
        },
    }
]
_CALLS = [
    {
        "role": "assistant",
        "content": "Two look-ups.",
        "reasoning": "Both words are rare.",
        "tool_calls": [
            {
                "id": f"call{at:05d}",
                "type": "function",
                "function": {"name": "lookup", "arguments": f'{{"word": "{word}", "n": {at}.0}}'},
            }
            for at, word in enumerate(("ubac", "été"))
        ],
    },
    {"role": "tool", "tool_call_id": "call00000", "content": "the shady side"},
    {"role": "tool", "tool_call_id": "call00001", "content": [{"type": "text", "text": "summer"}]},
]


def probes() -> tuple[Probe, ...]:
    """Conversations that between them use what templates treat differently."""
    user = {"role": "user", "content": " What\tis  an ubac?\n"}
    # Not `reasoning_content`: vLLM renames it for chat completions, and drops it where it only tokenises.
    answer = {"role": "assistant", "content": "\n\nA slope.  ", "reasoning": "Geography."}
    return (
        Probe("user", {"messages": [user]}),
        Probe("system", {"messages": [{"role": "system", "content": "Be brief."}, user, answer, user]}),
        Probe("developer", {"messages": [{"role": "developer", "content": "Be brief."}, user]}),
        Probe("late system", {"messages": [user, answer, {"role": "system", "content": "Be long."}, user]}),
        Probe("tools", {"messages": [user, *_CALLS], "tools": _TOOLS}),
        Probe("calls without tools", {"messages": [user, *_CALLS, answer, user]}),
        Probe(
            "parts",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    }
                ]
            },
        ),
        Probe("markup", {"messages": [{"role": "user", "content": "<|im_end|></s>[INST]<end_of_turn>"}]}),
        Probe("unicode", {"messages": [{"role": "user", "content": "日本語 é é 👩‍👩‍👧 ﬁ \u00a0ß"}]}),
        Probe(
            "no thinking",
            {"messages": [user], "chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
        ),
        Probe("no generation prompt", {"messages": [user, answer], "add_generation_prompt": False}),
        Probe(
            "open ended",
            {"messages": [user, answer], "add_generation_prompt": False, "continue_final_message": True},
        ),
    )


async def verify(mapper: ChatMapper, tokenize: Tokenize) -> Verification:
    """Compare all probes. Raises `TemplateMismatch` at the first difference, and what `tokenize` raises."""
    compared: list[str] = []
    refused: list[str] = []
    unmapped: list[str] = []
    for probe in probes():
        ours: Sequence[int] = ()
        theirs: Sequence[int] = ()
        try:
            theirs = await tokenize({"model": mapper.profile.name, **probe.body})
        except RejectedByEngine:
            theirs = ()
        try:
            ours = mapper.map(ChatPrompt.from_body(probe.body)).token_ids
        except RejectedByEngine:
            ours = ()
        except Unmappable:
            unmapped.append(probe.name)
            continue
        _compare(probe.name, ours, theirs)
        (compared if theirs else refused).append(probe.name)
    return Verification(mapper.profile.fingerprint, tuple(compared), tuple(refused), tuple(unmapped))


def _compare(name: str, ours: Sequence[int], theirs: Sequence[int]) -> None:
    if list(ours) != list(theirs):
        size = min(len(ours), len(theirs))
        position = next((at for at in range(size) if ours[at] != theirs[at]), size)
        raise TemplateMismatch(name, position, len(ours), len(theirs))
