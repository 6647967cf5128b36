"""Marks of texts: keyed digests of their lines and sentences, by which a quotation is known again.

A quoted text comes back inside another one: behind a role, within quotes or tags, escaped in JSON, cut off.
So it is taken apart where such things begin and end, and only pieces long enough to be telling count. Texts
are looked at up to a bound at both ends, so that a mark costs microseconds and no text costs milliseconds.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from proxy.followed_call import MessageHasher

MIN_PIECE = 20
"""Characters of the shortest piece that tells anything."""

MAX_PIECE = 160
"""Characters of a piece that count: quotations are cut off somewhere."""

HEAD_CHARS = 4_096
TAIL_CHARS = 2_048
"""How much of a long text is kept in marks, of its beginning and of its end."""

QUOTING_CHARS = 4
"""How many times as much is looked at where something quoted is sought: instructions stand around it."""

_BORDERS = re.compile(r"""\\+[nrt"'/]|["`<>|*#\n\r\t]+|(?<=[.!?:;,])\s+|\s-\s""")


def marks_of(text: str, hasher: MessageHasher, *, quoting: bool = False) -> Iterator[bytes]:
    """The marks of a text's pieces, in their order; of more of it if it may be `quoting`."""
    if len(text) < MIN_PIECE:
        return
    times = QUOTING_CHARS if quoting else 1
    if len(text) > (HEAD_CHARS + TAIL_CHARS) * times:
        text = f"{text[: HEAD_CHARS * times]}\n{text[-TAIL_CHARS * times :]}"
    for piece in _BORDERS.split(text):
        if piece is not None and len(piece) >= MIN_PIECE:
            if "  " in piece:
                piece = " ".join(piece.split())
            piece = piece.strip(" .!?:;,'()[]{}-")
            if len(piece) >= MIN_PIECE:
                yield hasher.mark(piece[:MAX_PIECE])


def texts_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What chat messages say, without the calls they make and without reasoning."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            for part in content:
                text = part.get("text") if isinstance(part, dict) else None
                if isinstance(text, str):
                    yield text


def texts_in_arguments(arguments: str) -> Iterator[str]:
    """The texts in a tool call's arguments: what a subagent may have been told."""
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        yield arguments
        return
    waiting = [decoded]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += reversed(value.values())
        elif isinstance(value, list):
            waiting += reversed(value)
