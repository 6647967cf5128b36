"""Head and body leave together where both are at hand, and nothing waits for what is not."""

import asyncio
import socket
from typing import cast

from proxy.joined_writes import JoinedWrites

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"


class Wire:
    """A transport that keeps what each write handed over."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False
        self.written = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        self.written.set()

    def writelines(self, pieces: tuple[bytes, ...]) -> None:
        for piece in pieces:  # each stays one of its own, as with newer Pythons
            self.write(piece)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        self.writes.append(b"EOF")

    def get_extra_info(self, name: str) -> str:
        return f"the {name}"


def joined() -> tuple[JoinedWrites, Wire]:
    wire = Wire()
    return JoinedWrites(cast(asyncio.Transport, wire)), wire


async def test_a_head_and_its_body_leave_at_once_and_together() -> None:
    transport, wire = joined()
    transport.write(HEAD)
    transport.write(b"body")
    assert wire.writes == [HEAD + b"body"]
    transport.write(b"more")
    await asyncio.sleep(0)
    assert wire.writes == [HEAD + b"body", b"more"]


async def test_an_empty_body_behind_a_head_leaves_nothing_unsent() -> None:
    transport, wire = joined()
    transport.write(HEAD)
    transport.write(b"")
    assert wire.writes == [HEAD]
    ours, theirs = socket.socketpair()
    real, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    reader, writer = await asyncio.open_connection(sock=theirs)
    transport = JoinedWrites(real)
    transport.write(HEAD)
    transport.write(b"")
    assert real.get_write_buffer_size() == 0
    transport.close()
    # An end comes only behind everything that was to be sent.
    assert await asyncio.wait_for(reader.read(), 10) == HEAD
    writer.close()


async def test_a_head_without_a_body_waits_for_nobody() -> None:
    transport, wire = joined()
    transport.write(HEAD)
    await asyncio.wait_for(wire.written.wait(), 10)
    assert wire.writes == [HEAD]


async def test_an_interim_answer_leaves_at_once() -> None:
    transport, wire = joined()
    transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert len(wire.writes) == 1


async def test_closing_writes_what_was_kept_back_and_a_closed_wire_gets_nothing() -> None:
    transport, wire = joined()
    transport.write(HEAD)
    transport.close()
    assert (wire.writes, wire.closed) == ([HEAD], True)
    transport, wire = joined()
    transport.write(HEAD)
    transport.write_eof()
    assert wire.writes == [HEAD, b"EOF"]
    transport, wire = joined()
    transport.write(HEAD)
    wire.closed = True
    await asyncio.sleep(0)
    assert not wire.writes
    assert transport.get_extra_info("peername") == "the peername"
