"""Which paths are followed, and where their bodies are read."""

import json
import threading
from typing import Any

import pytest

from proxy.call_readers import OFF_LOOP_BYTES, READERS, parse_calls, read_calls
from proxy.followed_call import MessageHasher, NotFollowed
from tests.proxy.conversations import HASHER

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", [*READERS, "/v1/score"])
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"messages": 5, "prompt": 5}'])
def test_what_cannot_be_followed_is_named_with_the_reason(path: str, body: bytes) -> None:
    with pytest.raises(NotFollowed, match=f"^{path} is not followed"):
        parse_calls(path, body, HASHER)


async def test_large_bodies_are_read_off_the_event_loop() -> None:
    class Spy(MessageHasher):
        thread = 0

        def head(self, document: Any) -> bytes:
            self.thread = threading.get_ident()
            return super().head(document)

    for size, on_loop in ((10, True), (OFF_LOOP_BYTES, False)):
        spy = Spy(b"k")
        document = {"messages": [{"role": "user", "content": "x" * size}]}
        size_bytes = len(json.dumps(document))
        assert len((await read_calls(CHAT, document, size_bytes, spy))[0].messages) == 1
        assert (spy.thread == threading.get_ident()) is on_loop
