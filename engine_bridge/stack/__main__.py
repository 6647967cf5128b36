"""`python -m engine_bridge.stack install | run`: the engine environment, and the stack until interrupted."""

import argparse
import asyncio
import contextlib
import json
import signal
import sys

from engine_bridge.stack.environment import EngineEnvironment


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


async def _serve(chunk_size: int) -> None:
    # The installer must work before httpx, which the stack polls with, is there.
    from engine_bridge.stack.engine_stack import EngineStack, StackOptions

    stack = EngineStack(options=StackOptions(chunk_size=chunk_size))
    task = asyncio.current_task()
    if task is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    _say(f"starting; logs are in {stack.run_dir}")
    async with stack:
        urls = {
            "upstream": stack.upstream_url,
            "model": stack.options.model_name,
            "model_path": stack.model_path,
            "coordinator": stack.coordinator_url,
            "lmcache": stack.lmcache_url,
            "events": stack.events_endpoint,
            "replay": stack.replay_endpoint,
            "chunk_size": chunk_size,
        }
        sys.stdout.write(json.dumps(urls) + "\n")
        sys.stdout.flush()
        await stack.watch()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_bridge.stack", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="build .engine: environment and tiny model")
    run = commands.add_parser("run", help="serve until interrupted; addresses go to standard output as JSON")
    run.add_argument("--chunk-size", type=int, default=64, help="tokens in a chunk (default 64)")
    arguments = parser.parse_args()
    if arguments.command == "install":
        done = EngineEnvironment().install(_say)
        _say("installed" if done else "already installed")
    else:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(_serve(arguments.chunk_size))
    return 0


if __name__ == "__main__":
    sys.exit(main())
