"""The suites: how each is started against one address, and how its report becomes verdicts by case."""

import asyncio
import hashlib
import json
import os
from base64 import b64decode
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from proxy.engine_admin import is_engine_admin
from suites.environment import SuitesEnvironment
from suites.verdicts import Verdict, Verdicts
from suites.world import OPTIONS, THROUGH, World

FOREIGN = Path(__file__).parent / "foreign"
SECONDS = 300.0
"""Bound of one suite on one way."""

MODEL = OPTIONS.model_name
ONE_ANSWER = ("content-length", "date")
"""How headers begin that are another in every answer."""

OURS = ("x-kv-", "server-timing", "x-request-id")
"""How the headers begin that the proxy adds, see `docs/wire.md`. The clients' cases show them, explained."""

FORMATS = {"chat": "openai-chat", "Responses": "open-responses", "Messages": "anthropic"}
"""llm-comply's names for the wire APIs."""


class SuiteBroken(RuntimeError):
    """A suite did not come to its report; the message carries the end of what it wrote."""


@dataclass(frozen=True)
class Target:
    """One way to the engine: base URL without `/v1`, and the name by which the model is asked for."""

    url: str
    model: str


Run = Callable[[Target], Awaitable[Verdicts]]


@dataclass(frozen=True)
class Suite:
    """The same run on two ways."""

    name: str
    run: Run
    direct: Target
    through: Target


class Runner:
    """Starts suites in their environment. Reports and errors stay in `run_dir`."""

    def __init__(self, environment: SuitesEnvironment, run_dir: Path) -> None:
        self._environment = environment
        self._run_dir = run_dir.absolute()

    def suites(self, world: World) -> list[Suite]:
        """The wire APIs first, then the clients, the fuzzer last."""
        engine, proxy = Target(world.engine, world.model), Target(world.proxy, world.model)
        litellm = Target(world.litellm, world.model)
        openai = self._python("openai_python.py")
        found = [
            Suite(f"llm-comply {api}", self._llm_comply(spoken), engine, proxy)
            for api, spoken in FORMATS.items()
        ]
        found += [
            Suite("openai-python", openai, engine, proxy),
            Suite("openai-node", self._node, engine, proxy),
            Suite("anthropic", self._python("anthropic_python.py"), engine, proxy),
            Suite("LiteLLM SDK before us", self._python("litellm_python.py"), engine, proxy),
            Suite("LiteLLM proxy before us", openai, litellm, Target(world.litellm, THROUGH)),
            Suite(
                "LiteLLM proxy behind us", openai, litellm, Target(world.proxy_before_litellm, world.model)
            ),
            Suite("schemathesis", self._schemathesis, engine, proxy),
        ]
        return found

    def _llm_comply(self, spoken: str) -> Run:
        async def run(target: Target) -> Verdicts:
            command: list[str | Path] = [
                self._environment.command("llm-comply"),
                "--base-url",
                f"{target.url}/v1",
            ]
            command += ["--api-key", "any", "--model", target.model, "--format", spoken, "--json"]
            return comply_verdicts(await self._output(command, returns=(0, 1)))

        return run

    def _python(self, script: str) -> Run:
        async def run(target: Target) -> Verdicts:
            command: list[str | Path] = [self._environment.python, FOREIGN / script, target.url, target.model]
            return case_verdicts(await self._output(command), target.model, MODEL)

        return run

    async def _node(self, target: Target) -> Verdicts:
        variables = {"NODE_MODULES": str(self._environment.node_modules.absolute())}
        command: list[str | Path] = [
            self._environment.node,
            FOREIGN / "openai_node.mjs",
            target.url,
            target.model,
        ]
        return case_verdicts(await self._output(command, variables), target.model, MODEL)

    async def _schemathesis(self, target: Target) -> Verdicts:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            schema = (await client.get(f"{target.url}/openapi.json")).json()
        report = self._run_dir / "schemathesis.ndjson"
        report.unlink(missing_ok=True)
        command: list[str | Path] = [self._environment.command("schemathesis")]
        command += ["--config-file", FOREIGN / "schemathesis.toml", "run", f"{target.url}/openapi.json"]
        for path in schema["paths"]:
            if is_engine_admin(path):
                command += ["--exclude-path", path]
        command += ["--phases", "coverage,fuzzing", "--max-examples", "4", "--generation-deterministic"]
        command += ["--no-shrink", "--continue-on-failure", "--request-timeout", "20", "--no-color"]
        command += ["--report", "ndjson", "--report-ndjson-path", report]
        hooks = {"PYTHONPATH": str(FOREIGN), "SCHEMATHESIS_HOOKS": "cheap_calls"}
        await self._output(command, hooks, returns=(0, 1))
        with report.open() as lines:
            return operation_verdicts(json.loads(line) for line in lines)

    async def _output(
        self,
        command: Sequence[str | Path],
        variables: Mapping[str, str] | None = None,
        returns: Sequence[int] = (0,),
    ) -> str:
        """Standard output of a suite that came to its end; raises `SuiteBroken`."""
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self._run_dir,
            env={**os.environ, "NO_PROXY": "127.0.0.1", **(variables or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(SECONDS):
                out, err = await process.communicate()
        except TimeoutError:
            process.kill()
            out, err = await process.communicate()
            raise SuiteBroken(f"not done after {SECONDS:.0f} s: {_end(out)}{_end(err)}") from None
        if process.returncode not in returns:
            raise SuiteBroken(f"ended with code {process.returncode}: {_end(out)}{_end(err)}")
        return out.decode()


def _end(output: bytes) -> str:
    return output.decode(errors="replace")[-2000:]


def comply_verdicts(report: str) -> Verdicts:
    """From llm-comply's JSON. Its complaints are compared without the ids that they quote."""
    found = {}
    for result in json.loads(report)["results"]:
        complaints = [_without_ids(each) for each in (*result.get("errors", ()), *result.get("warnings", ()))]
        found[result["id"]] = Verdict(result["status"], {"complaints": complaints})
    return found


def _without_ids(text: str) -> str:
    """The complaint up to the value that it quotes: `output.0: {…} is not valid …`."""
    head, brace, rest = text.partition("{")
    return head + brace + rest.rpartition("}")[2] if brace else text


def case_verdicts(lines: str, asked_for: str, model: str) -> Verdicts:
    """From the lines of `foreign/case_log.py`; the name by which the model was asked for is no difference."""
    found = {}
    for line in lines.splitlines():
        said = json.loads(line)
        found[said["case"]] = Verdict(said["outcome"], _renamed(said["saw"], asked_for, model))
    return found


def _renamed(value: Any, asked_for: str, model: str) -> Any:
    if isinstance(value, dict):
        return {key: _renamed(each, asked_for, model) for key, each in value.items()}
    if isinstance(value, list):
        return [_renamed(each, asked_for, model) for each in value]
    return value.replace(asked_for, model) if isinstance(value, str) else value


def operation_verdicts(events: Iterable[Mapping[str, Any]]) -> Verdicts:
    """From schemathesis' NDJSON: by operation and phase its status, the checks that failed, and each answer.

    Answers are compared one by one in the order of their requests, which is the same in each run: status,
    headers, and of a refusal the body. A digest stands for the requests, so that a run that asked for
    something else is seen.
    """
    found: dict[str, Verdict] = {}
    for event in events:
        scenario = event.get("ScenarioFinished")
        if scenario is None or scenario["status"] == "skip":
            continue
        recorder = scenario["recorder"]
        exchanges = list(recorder.get("interactions", {}).values())
        checks = [each for checks in recorder.get("checks", {}).values() for each in checks]
        found[f"{recorder['label']} ({scenario['phase']})"] = Verdict(
            {"success": "passed", "failure": "failed"}.get(scenario["status"], scenario["status"]),
            {
                "failed checks": sorted({each["name"] for each in checks if each["status"] != "success"}),
                "requests": _digest([_request(each["request"]) for each in exchanges]),
                "answers": [_answer(each.get("response")) for each in exchanges],
            },
        )
    return found


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _request(request: Mapping[str, Any]) -> list[object]:
    parts = urlsplit(request["uri"])
    return [request["method"], parts.path, parts.query, request.get("body")]


def _answer(response: Mapping[str, Any] | None) -> dict[str, Any]:
    if response is None:
        return {"status": "no answer"}
    found = response["headers"].items()
    headers = {name: each for name, each in found if not name.startswith(ONE_ANSWER + OURS)}
    refused = response["status_code"] >= 400
    body = b64decode(response["content"]["$base64"]).decode(errors="replace") if refused else ""
    return {"status": response["status_code"], "headers": headers, "body": body}
