"""Latency that the proxy adds to a chat call on loopback: direct, bypass, observe, enforce, in turns.

`python -m bench.added_latency [--calls 240] [--repeats 5] [--gap-ms 20]`. One keep-alive connection, agents
of 12 turns (bodies of 1 to 4 KB, a named context each), a pause between calls as an engine's own time would
be, a fixed answer from an engine of a few lines in a process of its own. The proxy runs in another process
with the lifecycle on: tracking, the SQLite log, and mapping with `.engine/model` if it is there.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from lifecycle.vocabulary import Mode
from proxy.app import serving
from proxy.config import Config, Listener, ModelConfig, UpstreamConfig
from proxy.log_output import configure_logging

MODEL_DIR = Path(".engine/model")
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "bench",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 200, "completion_tokens": 1, "total_tokens": 201},
}
MODELS = {"data": [{"id": "bench"}]}
TURNS = 12
MAX_SECONDS = 240


def _engine(ready: Connection) -> None:
    """Answers every request at once; `/v1/models` with its one model."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                await reader.readexactly(length)
                body = json.dumps(MODELS if b"/v1/models" in head else ANSWER).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                    % (len(body), body)
                )
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def _proxy(ready: Connection, engine_port: int, mode: str, directory: str) -> None:
    models = (ModelConfig(path=str(MODEL_DIR), name="bench"),) if MODEL_DIR.exists() else ()
    config = Config(
        data=Listener(port=0),
        admin=Listener(port=0),
        upstream=UpstreamConfig(url=f"http://127.0.0.1:{engine_port}"),
        models=models,
        mode=Mode(mode),
        log_url=f"sqlite:///{directory}/{mode}.db",
    )

    # As in production: a line a call, into a file.
    os.dup2(os.open(Path(directory, f"{mode}.log"), os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    configure_logging("info", "json")

    async def run() -> None:
        async with serving(config) as up:
            await up.runtime.prepared.wait()
            ready.send(int(up.data_url.rsplit(":", 1)[1]))
            await asyncio.Event().wait()

    uvloop.run(run())


class Client:
    """One keep-alive connection, agents of 12 turns one after the other."""

    def __init__(self, port: int, gap_seconds: float) -> None:
        self._gap_seconds = gap_seconds
        self._num_calls = 0
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _request(self) -> bytes:
        agent, turn = divmod(self._num_calls, TURNS)
        self._num_calls += 1
        messages = [
            {"role": "system", "content": "rule " * 100},
            {"role": "user", "content": f"task {agent} " + "go " * 100},
        ]
        for number in range(turn):
            messages.append({"role": "assistant", "content": "done"})
            messages.append({"role": "user", "content": f"next {number} " + "on " * 50})
        body = json.dumps({"model": "bench", "messages": messages}).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"x-kv-session-id: agent-%d\r\ncontent-length: %d\r\n\r\n%s" % (agent, len(body), body)
        )

    def call(self) -> float:
        """Seconds from the first request byte to the last answer byte."""
        time.sleep(self._gap_seconds)
        request = self._request()
        began = time.perf_counter()
        self._socket.sendall(request)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._socket.recv(65536)
        head, _, rest = answer.partition(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        while len(rest) < length:
            rest += self._socket.recv(65536)
        return time.perf_counter() - began


@contextlib.contextmanager
def _process(target: object, *arguments: object) -> Iterator[int]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments))  # type: ignore[arg-type]
    process.start()
    theirs.close()
    try:
        if not ours.poll(60):
            raise TimeoutError("a process did not come up")
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def main() -> None:
    """Print the table."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("stopped"))
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=240)
    parser.add_argument("--gap-ms", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=5)
    wanted = parser.parse_args()
    deadline = time.monotonic() + MAX_SECONDS
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        engine = stack.enter_context(_process(_engine))
        gap = wanted.gap_ms / 1e3
        clients = {"direct": Client(engine, gap)}
        for mode in ("bypass", "observe", "enforce"):
            clients[mode] = Client(stack.enter_context(_process(_proxy, engine, mode, directory)), gap)
        for client in clients.values():
            for _ in range(2 * TURNS):
                client.call()
        p50: dict[str, list[float]] = {name: [] for name in clients}
        p99: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(wanted.repeats):
            for name, client in clients.items():
                if time.monotonic() > deadline:
                    raise SystemExit("too slow: stopped")
                times = sorted(client.call() * 1e3 for _ in range(wanted.calls))
                p50[name].append(times[len(times) // 2])
                p99[name].append(times[int(len(times) * 0.99)])
    print(f"{wanted.calls} calls x {wanted.repeats}, one connection, 1-4 KB; ms: median (min-max) of repeats")
    print("| path | p50 | p99 | added p50 | added p99 |")
    print("|---|---|---|---|---|")
    for name in clients:
        added = [f"{statistics.median(t[name]) - statistics.median(t['direct']):.2f}" for t in (p50, p99)]
        print(f"| {name} | {_cell(p50[name])} | {_cell(p99[name])} | {added[0]} | {added[1]} |")


def _cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


if __name__ == "__main__":
    main()
