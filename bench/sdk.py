"""What an agent pays for telling: the time that one operation of the SDK takes where it is recorded.

`python -m bench.sdk [--rounds 400]`. The exporter sends to a server in another process meanwhile, as it
does in an agent. By the wall clock, in microseconds: medians of those that follow another one, of the first
after a pause, when the processor's caches are cold, and from the 10th to the 90th percentile of the former.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection as Pipe
from statistics import median, quantiles
from typing import Any

from kvtether import Client, Context

BURST = 10
"""Times that each operation is done at a time, between two pauses as an agent makes them."""

PAUSE_SECONDS = 0.005
NUM_MESSAGES = 200


class _Proxy(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        ops = json.loads(self.rfile.read(int(self.headers["content-length"])))["ops"]
        payload = json.dumps({"results": [{"status": "applied"} for _ in ops]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: object) -> None:
        pass


def _serve(pipe: Pipe) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    pipe.send(server.server_port)
    server.serve_forever()


def message(n: int) -> dict[str, Any]:
    return {"role": "user", "content": f"message {n} " * 20}


def cases(ctx: Context, listed: Context) -> dict[str, Callable[[int], object]]:
    """What is measured, by what it is called in the table. Lists stay as long as they are."""
    messages = listed.messages

    def rewrite(n: int) -> None:
        messages[NUM_MESSAGES // 2 :] = [message(n), *messages[NUM_MESSAGES // 2 + 1 :]]

    def sync(n: int) -> None:
        messages.sync([*messages[:-1], message(n)])

    def grow(n: int) -> None:
        messages.append(message(n))

    return {
        "for comparison: a small dictionary is made": lambda n: {"op": "append", "seq": n, "span": [1, 2]},
        "`ctx.append()`": lambda n: ctx.append(),
        "`ctx.replace(1, 3, 1)`": lambda n: ctx.replace(1, 3, 1),
        "`ctx.remove(1, 2)`": lambda n: ctx.remove(1, 2),
        '`ctx.pin("system")`': lambda n: ctx.pin("system"),
        '`ctx.waiting("tool", "pytest", 20)`': lambda n: ctx.waiting("tool", "pytest", 20),
        "`messages.append(…)`": grow,
        "`del messages[-1]`": lambda n: messages.__delitem__(-1),
        "`messages[-1] = …`": lambda n: messages.__setitem__(-1, message(n)),
        f"slice of {NUM_MESSAGES // 2} messages assigned, one of them new": rewrite,
        f"`messages.sync(…)`, {NUM_MESSAGES} messages, the last one new": sync,
        "`ctx.headers()`": lambda n: ctx.headers(),
    }


def measure(client: Client, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each repetition, burst by burst; the first round warms up and does not count."""
    ctx, listed = Context(client=client), Context(client=client)
    ctx.headers()
    listed.messages.extend(message(n) for n in range(NUM_MESSAGES))
    listed.headers()
    found: dict[str, list[float]] = {}
    for round_ in range(rounds + 1):
        for name, case in cases(ctx, listed).items():
            spent = []
            for n in range(BURST):
                before = time.perf_counter_ns()
                case(n)
                spent.append((time.perf_counter_ns() - before) / 1000)
            if round_:
                found.setdefault(name, []).extend(spent)
            time.sleep(PAUSE_SECONDS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    rounds = parser.parse_args().rounds
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    client = Client(f"http://127.0.0.1:{ours.recv()}")
    found = measure(client, rounds)
    client.close()
    server.terminate()
    print("| operation | µs | 10th to 90th percentile | first after a pause |\n|---|---|---|---|")
    for name, spent in found.items():
        first = median(spent[::BURST])
        tenths = quantiles((each for n, each in enumerate(spent) if n % BURST), n=10)
        print(f"| {name} | {tenths[4]:.1f} | {tenths[0]:.1f}–{tenths[8]:.1f} | {first:.1f} |")


if __name__ == "__main__":
    main()
