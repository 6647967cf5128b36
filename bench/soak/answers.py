"""What the engine of the soak says: both sides work it out from the call's number, so that neither needs to
tell the other, and a byte that changed on the way shows whatever was restarted meanwhile."""

import json
import random
from typing import Any, NamedTuple

NUMBER_HEADER = "x-soak-call"
DIGEST_HEADER = "x-soak-body"
OUR_FIELDS = ("session_id", "kv_transfer_params", "cache_salt", "return_token_ids", "kv_lifecycle")
"""Members that the proxy adds to a request or takes out of it; what is left must be the client's."""

BREAKS_EVERY = 25
"""One answer in so many is broken off by the engine."""


class Answer(NamedTuple):
    """The pieces of a body, the seconds between two of them, and whether its end is missing."""

    streamed: bool
    pieces: tuple[bytes, ...]
    gap_seconds: float
    breaks: bool

    @property
    def body(self) -> bytes:
        """All of it, as far as it is sent."""
        return b"".join(self.pieces)


def answer(number: int, streamed: bool) -> Answer:
    """The answer to call `number`."""
    chance = random.Random(number)
    text = "".join(
        chance.choice("abcdefghijklmnopqrstuvwxyzäöü漢字 \n") for _ in range(chance.randrange(5, 300))
    )
    base: dict[str, Any] = {"id": f"chatcmpl-{number}", "created": 1, "model": "toy"}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    if not streamed:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        padding = "x" * chance.choice((0, 0, 0, 100_000))
        document = {**base, "object": "chat.completion", "choices": [choice], "usage": usage, "x": padding}
        whole = json.dumps(document, ensure_ascii=False).encode()
        pieces: list[bytes] = [whole]
    else:
        base["object"] = "chat.completion.chunk"
        events = [
            {**base, "choices": [{"index": 0, "delta": {"content": part}}]} for part in _parts(chance, text)
        ]
        events.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        events.append({**base, "choices": [], "usage": usage})
        end = chance.choice((b"\n\n", b"\r\n\r\n"))
        whole = b"".join(b"data: " + json.dumps(e, ensure_ascii=False).encode() + end for e in events)
        whole += b": bye" + end + b"data: [DONE]" + end
        # Cut anywhere: inside events, inside characters.
        cuts = sorted(chance.sample(range(1, len(whole)), 12))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    breaks = number % BREAKS_EVERY == 0
    if breaks:
        # The end is missing altogether, or only what says that it is the end.
        pieces[-1] = pieces[-1][:-20]
    return Answer(streamed, tuple(pieces), chance.choice((0.0, 0.0, 0.002, 0.02)), breaks)


def _parts(chance: random.Random, text: str) -> list[str]:
    size = chance.randrange(3, 40)
    return [text[at : at + size] for at in range(0, len(text), size)]
