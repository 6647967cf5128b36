"""Several prompts in one request: each is a call of its own to the lifecycle, with its own answers."""

from collections.abc import Sequence

import msgspec

from lifecycle.vocabulary import CallEnd
from proxy.answer_facts import AnswerFacts, Usage
from proxy.lifecycle_fields import LifecycleFields
from proxy.tracked_call import TrackedCall


class TrackedBatch:
    """The calls of one request, in the order of its prompts. Satisfies `CallObserver`.

    The engine numbers the choices of the first prompt first. It counts tokens for all prompts together, and
    a stream's first piece tells of one of them only: neither is told to the single calls.
    """

    def __init__(self, calls: Sequence[TrackedCall]) -> None:
        self._calls = calls

    def on_head(self, status: int) -> None:
        """The engine's answer begins."""
        for call in self._calls:
            call.on_head(status)

    def on_first_token(self) -> None:
        """One of the prompts is computed, nobody knows which."""

    def on_end(self, end: CallEnd, facts: AnswerFacts, reason: str) -> None:
        """The request is over."""
        for place, call in enumerate(self._calls):
            call.on_end(end, facts_of_prompt(facts, place, call.request.asked.num_choices), reason)


def facts_of_prompt(facts: AnswerFacts, place: int, num_choices: int) -> AnswerFacts:
    """What an answer says of prompt number `place`, with `num_choices` choices a prompt."""
    first = place * num_choices
    own = tuple(
        msgspec.structs.replace(choice, index=choice.index - first)
        for choice in facts.choices
        if first <= choice.index < first + num_choices
    )
    return msgspec.structs.replace(facts, choices=own, usage=Usage(), prompt_token_ids=None)


def fields_of_prompt(fields: LifecycleFields, place: int, num_prompts: int) -> LifecycleFields:
    """What a request's fields say of prompt number `place`.

    Operations count once, with the first prompt; a named call gets a number behind its name from the second
    on; a context that is named ends with the last prompt of the request, not before.
    """
    if num_prompts == 1:
        return fields
    closes = fields.close and (not fields.ctx or place == num_prompts - 1)
    if place == 0:
        return msgspec.structs.replace(fields, close=closes)
    return msgspec.structs.replace(
        fields,
        call=f"{fields.call}.{place}" if fields.call else "",
        close=closes,
        pins=(),
        ops=(),
        source="",
        seq=None,
    )
