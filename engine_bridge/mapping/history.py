"""The messages of a context, normalised once.

Comparing a new request with the last one must be exact and cheap: a thousand unchanged messages cost well
under a millisecond. Messages of text alone are compared as they are; others by their JSON, for 1, true and
1.0 are equal in Python but not in a prompt.
"""

from typing import Any

import msgspec

from engine_bridge.mapping.normalise import ContentFormat, Message, normalise_message

_encode = msgspec.json.encode


class History:
    """Client messages and their normal forms, in step. A message whose normal form equals it is held once.

    `first_developer`: index of the first developer message, if there is one.
    """

    def __init__(self) -> None:
        self.raw: list[Message] = []
        self.normal: list[Message] = []
        self._strict: dict[int, bytes] = {}
        self._format: ContentFormat | None = None
        self.first_developer: int | None = None

    def copy(self) -> "History":
        twin = History()
        twin.__dict__.update(self.__dict__)
        twin.raw, twin.normal, twin._strict = self.raw[:], self.normal[:], dict(self._strict)
        return twin

    def update(self, messages: list[Message], content_format: ContentFormat) -> int:
        """Take over a request's messages; answers how many leading ones are unchanged.

        The normal forms of those stay the same objects. Raises `Unmappable`, having changed nothing.
        """
        common = self._common(messages) if content_format == self._format else 0
        fresh = [normalise_message(message, content_format) for message in messages[common:]]
        del self.raw[common:], self.normal[common:]
        self._strict = {at: encoded for at, encoded in self._strict.items() if at < common}
        if self.first_developer is not None and self.first_developer >= common:
            self.first_developer = None
        for at, (message, normal) in enumerate(zip(messages[common:], fresh, strict=True), common):
            if message == normal and _only_text(message):
                self.raw.append(normal)
            else:
                self.raw.append(message)
                if not _only_text(message):
                    self._strict[at] = _encode(message)
            self.normal.append(normal)
            if normal["role"] == "developer" and self.first_developer is None:
                self.first_developer = at
        self._format = content_format
        return common

    def _common(self, messages: list[Message]) -> int:
        size = min(len(self.raw), len(messages))
        if self.raw[:size] != messages[:size]:
            size = next(at for at in range(size) if self.raw[at] != messages[at])
        for at, encoded in self._strict.items():
            if at < size and _encode(messages[at]) != encoded:
                size = at
        return size


def _only_text(message: Message) -> bool:
    """Whether equality in Python is equality in a prompt: text or null in known places only."""
    for field, value in message.items():
        if isinstance(value, str) or value is None:
            continue
        if field == "tool_calls" and isinstance(value, list) and all(map(_is_text_call, value)):
            continue
        return False
    return True


def _is_text_call(call: Any) -> bool:
    if not isinstance(call, dict) or call.keys() != {"id", "type", "function"}:
        return False
    function = call["function"]
    return (
        isinstance(function, dict)
        and function.keys() == {"name", "arguments"}
        and all(isinstance(value, str) for value in function.values())
    )
