"""What the opt-in normalisers find in a text: spans that change from call to call.

Each is a pure function from a text to edits of it. What a model no longer sees by it: docs/lint.md.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec


class Normaliser(StrEnum):
    """What may be asked for by `normalise`."""

    CLAUDE_BILLING = "claude_billing"
    CCH_NONCE = "cch_nonce"
    TOKEN_COUNTDOWN = "token_countdown"
    DATE_IN_SYSTEM = "date_in_system"


class Voice(StrEnum):
    """Whose words a text is: those of the agent's system prompt, or a user message's."""

    SYSTEM = "system"
    USER = "user"


class TextEdit(msgspec.Struct, frozen=True):
    """Characters `[start, end)` of a text give way to `text`: printable ASCII, no `"` and no backslash."""

    start: int
    end: int
    text: str = ""


NOT_SHOWN = "not shown"
"""What stands where a number or a time stood: the model is told nothing that is not so."""

BILLING_MARK = "x-anthropic-billing-header:"
"""How the line begins by which Claude Code names version, entry point and a checksum of the request."""

STEADY_CCH = "00000"

_PAIR = r"[A-Za-z_]\w*=[^;\s]*"
_BILLING = re.compile(
    rf"^(?:[ \t]*{BILLING_MARK}[ \t]*"
    rf"(?:(?={_PAIR})(?:{_PAIR};[ \t]*)*(?:{_PAIR}(?=\s|\Z)[ \t]*)?(?:\r?\n)?|[^\n]*(?:\n|\Z)))+",
    re.MULTILINE,
)
"""The line with its end; of a line that goes on behind the last `name=value;` only up to there: some gateways
join system blocks without a line end."""

_BILLING_LINE = re.compile(rf"^[ \t]*{BILLING_MARK}[^\n]*", re.MULTILINE)
_CCH = re.compile(r"\bcch=([0-9A-Fa-f]+)")

_NUMBER = r"\d(?:[\d,._]*\d)?[ \t]*(?:[kKmM]\b|%)?"
_COUNTDOWN_LABEL = (
    r"(?i:token usage|tokens? (?:remaining|left|used)|remaining (?:context )?tokens?"
    r"|(?:remaining )?token budget(?: remaining| left)?|context (?:window )?(?:remaining|left|usage|used))"
)
_COUNTDOWN_VALUE = (
    rf"[~≈]?{_NUMBER}(?:[ \t]*(?:/|of|out of)[ \t]*{_NUMBER})?(?:[ \t]*tokens?\b)?"
    rf"(?:[ \t]*[;,][ \t]*{_NUMBER}[ \t]*(?:tokens?[ \t]+)?(?:remaining|left|used)\b)*"
)
_COUNTDOWN = rf"{_COUNTDOWN_LABEL}[ \t]*[:=][ \t]*(?P<value>{_COUNTDOWN_VALUE})"
_REMINDER = r"<(?P<tag>system_warning|system-warning|system-reminder)>"
_SYSTEM_COUNTDOWN = re.compile(rf"^[ \t>*#-]*(?:{_REMINDER}\s*)?{_COUNTDOWN}", re.MULTILINE)
_USER_COUNTDOWN = re.compile(rf"{_REMINDER}\s*{_COUNTDOWN}[.]?\s*</(?P=tag)>")
"""In a user message only a reminder that holds nothing else."""

_DATE_LABEL = (
    r"(?i:(?:the )?(?:"
    r"(?:today['’]?s|current|local|system)[ \t]+(?:date|time)(?:[ \t]*(?:and|&|/|,)[ \t]*(?:date|time))?"
    r"|(?:current[ \t]+)?date-?time|(?:current[ \t]+)?timestamp|date(?:[ \t]+and[ \t]+time)?|today|now"
    r"|(?:conversation|session)[ \t]+(?:started|date))(?:[ \t]*[:=]|[ \t]+is\b))"
)
_DATE_LINE = re.compile(rf"^[ \t>*#-]*(?:<\w+>)?{_DATE_LABEL}[^\n]*", re.MULTILINE)
_TIME_OF_DAY = re.compile(
    r"(?:(?<=\d)T|[ \t]*[,@][ \t]*|[ \t]+at[ \t]+|[ \t]+)?(?<![\d:.])"
    r"(?P<time>\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?![\d:])(?:[ \t]*[AaPp]\.?[Mm]\b\.?)?"
    r"(?:[ \t]*(?:Z|UTC|GMT)\b)?(?:[ \t]*[+-]\d{2}:?\d{2}\b)?(?:[ \t]*\([A-Za-z ]{2,40}\))?)"
)
_DAY = re.compile(
    r"\d{4}-\d{1,2}-\d{1,2}|\d{1,4}[./]\d{1,2}[./]\d{1,4}"
    r"|(?i:\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b)"
)


def edits(kinds: Sequence[Normaliser], voice: Voice, text: str) -> list[tuple[Normaliser, TextEdit]]:
    """What these normalisers change of a text, in its order; of two that overlap the first named counts.

    A text is left as it came if they would find more in what came out: so twice changes nothing.
    """
    found = _found(kinds, voice, text)
    return [] if found and _found(kinds, voice, edited(text, [e for _, e in found])) else found


def edited(text: str, changes: Sequence[TextEdit]) -> str:
    """The text with edits that do not overlap, in its order."""
    pieces: list[str] = []
    position = 0
    for change in changes:
        pieces += (text[position : change.start], change.text)
        position = change.end
    return "".join((*pieces, text[position:]))


def may_apply(kinds: Sequence[Normaliser], body: bytes) -> bool:
    """Whether one of them could find anything in a body: much cheaper than to read it."""
    return any(mark in body for kind in kinds for mark in _MARKS[kind])


def _found(kinds: Sequence[Normaliser], voice: Voice, text: str) -> list[tuple[Normaliser, TextEdit]]:
    taken: list[tuple[Normaliser, TextEdit]] = []
    for kind in kinds:
        for change in _RULES[kind](voice, text):
            if all(change.end <= other.start or change.start >= other.end for _, other in taken):
                taken.append((kind, change))
    return sorted(taken, key=lambda pair: pair[1].start)


def _billing(voice: Voice, text: str) -> Iterator[TextEdit]:
    if voice is Voice.SYSTEM and BILLING_MARK in text:
        yield from (TextEdit(*match.span()) for match in _BILLING.finditer(text))


def _cch(voice: Voice, text: str) -> Iterator[TextEdit]:
    if voice is Voice.SYSTEM and BILLING_MARK in text:
        for line in _BILLING_LINE.finditer(text):
            for match in _CCH.finditer(text, line.start(), line.end()):
                if match[1] != STEADY_CCH:
                    yield TextEdit(*match.span(1), STEADY_CCH)


def _countdown(voice: Voice, text: str) -> Iterator[TextEdit]:
    pattern = _SYSTEM_COUNTDOWN if voice is Voice.SYSTEM else _USER_COUNTDOWN
    yield from (TextEdit(*match.span("value"), NOT_SHOWN) for match in pattern.finditer(text))


def _date(voice: Voice, text: str) -> Iterator[TextEdit]:
    """The day stays. A time of day behind it goes; one without a day before it is not shown."""
    if voice is not Voice.SYSTEM:
        return
    for line in _DATE_LINE.finditer(text):
        for match in _TIME_OF_DAY.finditer(text, line.start(), line.end()):
            if _DAY.search(text, line.start(), match.start()):
                yield TextEdit(*match.span())
            else:
                yield TextEdit(*match.span("time"), f"({NOT_SHOWN})")


_RULES: Mapping[Normaliser, Callable[[Voice, str], Iterator[TextEdit]]] = {
    Normaliser.CLAUDE_BILLING: _billing,
    Normaliser.CCH_NONCE: _cch,
    Normaliser.TOKEN_COUNTDOWN: _countdown,
    Normaliser.DATE_IN_SYSTEM: _date,
}

_MARKS: Mapping[Normaliser, tuple[bytes, ...]] = {
    Normaliser.CLAUDE_BILLING: (BILLING_MARK.encode(),),
    Normaliser.CCH_NONCE: (BILLING_MARK.encode(),),
    Normaliser.TOKEN_COUNTDOWN: (b"oken", b"OKEN", b"ontext", b"ONTEXT"),
    Normaliser.DATE_IN_SYSTEM: (b"ate", b"ime", b"oday", b"ow", b"tarted", b"ATE", b"IME", b"ODAY", b"OW"),
}
