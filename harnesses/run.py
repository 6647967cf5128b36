"""One harness through its task: before the proxy, to be judged, or before the model alone, to be recorded."""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from harnesses.checks import Verdict, judge
from harnesses.engine import MODEL_NAME
from harnesses.model_server import ModelServer, scripted_model
from harnesses.modules import ROOT, Environment, HarnessModule
from harnesses.plain import behave
from harnesses.recording import write_recording
from harnesses.truth import Did, contexts, read_truth, true_requests
from harnesses.world import World, proxied_model
from lifecycle.vocabulary import DOUBT_SECONDS

RUN_SECONDS = 120.0
"""Longest that a harness may take."""

OUTPUT_CHARS = 1500
SEEDS = range(1, 5)
"""Of a plain agent's runs."""

FOREIGN = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "PYTHONPATH")
"""Variables that a harness does not inherit: it is to reach this machine only, and none of our packages."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a harness. `problem` is empty if it finished its task."""

    module: HarnessModule
    verdict: Verdict = Verdict()
    lines: int = 0
    problem: str = ""
    output: str = ""
    did_run: bool = True

    @property
    def ok(self) -> bool:
        return not self.did_run or (not self.problem and not self.verdict.lost)


async def run_proxied(module: HarnessModule, environment: Environment) -> Outcome:
    """Drive a harness before the proxy and judge what the proxy saw."""
    with tempfile.TemporaryDirectory(prefix="harness-") as name:
        folder = Path(name)
        async with proxied_model(folder, folder / "requests.jsonl") as world:
            problem, output = await drive(
                module, environment, folder, world.up.data_url, world.up.admin_url, world.model
            )
            truth = read_truth(folder / "truth.jsonl")
            verdict = await _judged(world)
            problem = problem or unfinished(truth)
            return Outcome(
                module=module,
                verdict=verdict,
                lines=module.lines(folder / "home"),
                problem=problem,
                output=output,
            )


async def run_plain(module: HarnessModule, behaviour: str) -> Outcome:
    """A plain agent's behaviour, under some seeds before the same proxy, and what was inferred of it."""
    with tempfile.TemporaryDirectory(prefix="harness-") as name:
        async with proxied_model(Path(name)) as world:
            for seed in SEEDS:
                await behave(behaviour, seed, world.up.data_url, MODEL_NAME)
            return Outcome(module=module, verdict=await _judged(world))


async def run_recorded(
    module: HarnessModule, environment: Environment, recordings: Path, number: int
) -> Path:
    """Drive a harness before the model alone, for the `number`th time; answers the recording."""
    with tempfile.TemporaryDirectory(prefix="harness-") as name:
        folder = Path(name)
        async with scripted_model() as model:
            await drive(module, environment, folder, model.url, model.url, model, number)
            return write_recording(recordings, module.name, true_requests(model.exchanges))


async def _judged(world: World) -> Verdict:
    """When the cache has come to rest, and what was only doubted is confirmed. A harness whose process has
    ended has no context that lives on."""
    await world.settle()
    requests = true_requests(world.model.exchanges)
    await world.let_pass(DOUBT_SECONDS + 1)
    await world.settle()
    await world.retried()
    return judge(
        requests,
        world.heard,
        ended=contexts(requests),
        left=world.leftovers(),
        removed=world.model.engine.removed,
        ends_of=world.model.engine.ends_of,
    )


def unfinished(truth: list[Did]) -> str:
    """Why the task is not done by what the driver wrote; empty if it is."""
    if not truth or truth[-1].did != "done":
        return "it did not say that it was done"
    answer = str(truth[-1].told.get("answer", ""))
    return "" if "Finished" in answer else f"its last answer is not the task's: {answer[:80]!r}"


async def drive(
    module: HarnessModule,
    environment: Environment,
    folder: Path,
    url: str,
    admin_url: str,
    model: ModelServer,
    number: int = 0,
) -> tuple[str, str]:
    """Run the module's process; answers what went wrong, empty for nothing, and the end of its output.

    `number` varies how much there is to do and to say.
    """
    for each in ("home", "work"):
        (folder / each).mkdir()
    process = await asyncio.create_subprocess_exec(
        str(environment.python),
        str(module.path),
        cwd=folder / "work",
        env=_variables(environment.variables, folder, url, admin_url, number),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    told: list[bytes] = []
    assert process.stdout is not None
    problem = ""
    try:
        async with asyncio.timeout(RUN_SECONDS):
            while piece := await process.stdout.read(65536):
                told.append(piece)
            await process.wait()
    except TimeoutError:
        problem = f"it did not end in {RUN_SECONDS:.0f} s"
    finally:
        # Whatever it left behind is of its own session, whose number is that of its first process.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if process.returncode and not problem:
        problem = f"it ended with {process.returncode}"
    output = b"".join(told).decode(errors="replace")[-OUTPUT_CHARS:]
    return problem, output + (f"\nasked in vain: {sorted(model.unknown)}" if model.unknown else "")


def _variables(own: Mapping[str, str], folder: Path, url: str, admin_url: str, number: int) -> dict[str, str]:
    run = secrets.token_hex(4)
    file = folder / "work" / "notes.txt"
    options = f"file={file} prose={1 + (number + 3) % 7} more={number % 4}"
    file.write_text("".join(f"Line {n} of the notes says {secrets.token_hex(8)}.\n" for n in range(40)))
    inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return {
        **inherited,
        "PYTHONPATH": str(ROOT / "sdk"),
        "PYTHONSAFEPATH": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "DO_NOT_TRACK": "1",
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "any",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "any",
        "KVTETHER_URL": url,
        "KVTETHER_API_KEY": "any",
        "KVTETHER_ADMIN_URL": admin_url,
        "HARNESS_MODEL": MODEL_NAME,
        "HARNESS_RUN": run,
        "HARNESS_FILE": str(file),
        "HARNESS_PROMPT": f"[[task full#{run} {options}]] Look around in the working directory.",
        "HARNESS_PROMPT_2": f"[[task tools#{run} {options}]] Look again.",
        "HARNESS_TRUTH": str(folder / "truth.jsonl"),
        "HARNESS_PYTHON": sys.executable,
        "HOME": str(folder / "home"),
        **own,
    }
