"""The harness modules that there are, read without importing them, and the environments they run in."""

import ast
import asyncio
import io
import json
import os
import shutil
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path

import msgspec

from harnesses.newer_python import VERSION, mirror, newest, unpacked, unpacking

ROOT = Path(__file__).resolve().parent.parent
AGENTS = ROOT / "harnesses" / "agents"
CONSTRAINTS = ROOT / "constraints" / "harnesses"
ENVIRONMENTS = ROOT / ".harnesses"
BEGINS, ENDS = "# integration begins", "# integration ends"
INSTALL_SECONDS = 900


class CannotRun(Exception):
    """The harness cannot be run here; the message says why."""


class HarnessModule(msgspec.Struct, frozen=True, kw_only=True):
    """What a module says of itself. `settings` is a path below HOME, empty if its integration is code."""

    name: str
    path: Path
    api: str = ""
    python: str = ""
    node: str = ""
    integration: str = ""
    settings: str = ""

    def lines(self, home: Path) -> int:
        """Lines that a user writes: code between the marks, and those of the settings that the run wrote."""
        written = code_lines(self.path.read_text())
        file = home / self.settings
        if self.settings and file.is_file():
            written += sum(bool(line.strip()) for line in file.read_text().splitlines())
        return written


def modules(folder: Path = AGENTS) -> list[HarnessModule]:
    """Every module, by name."""
    found = [read_module(path) for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    return sorted((each for each in found if each is not None), key=lambda each: each.name)


def read_module(path: Path) -> HarnessModule | None:
    """A module by the constants at its top; None for a file that names no harness."""
    told: dict[str, str] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            value = node.value.value
            told |= {t.id: value for t in node.targets if isinstance(t, ast.Name) and isinstance(value, str)}
    if "NAME" not in told:
        return None
    return HarnessModule(
        name=told["NAME"],
        path=path,
        api=told.get("API", ""),
        python=told.get("PYTHON", ""),
        node=told.get("NODE", ""),
        integration=told.get("INTEGRATION", ""),
        settings=told.get("SETTINGS", ""),
    )


def code_lines(source: str) -> int:
    """Lines between the marks that hold code: no blanks, no comments, no docstrings of their own line."""
    inside, marked = False, set()
    for number, line in enumerate(source.splitlines(), start=1):
        text = line.strip()
        if text in (BEGINS, ENDS):
            inside = text == BEGINS
        elif inside:
            marked.add(number)
    if not marked:
        return 0
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    holding: set[int] = set()
    begins_line = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in ignored:
            begins_line = begins_line or token.type == tokenize.NEWLINE
            continue
        is_docstring = (
            token.type == tokenize.STRING and begins_line and token.line.strip().startswith(('"""', "'''"))
        )
        if not is_docstring:
            holding |= set(range(token.start[0], token.end[0] + 1))
        begins_line = False
    return len(marked & holding)


class Environment(msgspec.Struct, frozen=True):
    """What a module is run with: its interpreter, and what its process needs beside."""

    python: Path
    variables: Mapping[str, str] = {}


async def prepare(module: HarnessModule) -> Environment:
    """The environment of a module, made where it is not there yet. Raises `CannotRun`."""
    interpreter = await _interpreter(module)
    if module.node and shutil.which("node") is None:
        raise CannotRun(f"needs Node {module.node}, here is none")
    folder = ENVIRONMENTS / module.name
    requirements = CONSTRAINTS / f"{module.name}.txt"
    packages = CONSTRAINTS / f"{module.name}.json"
    python, variables = Path(sys.executable), {}
    if requirements.exists():
        python = folder / "venv" / "bin" / "python"
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"]
        venv = [str(interpreter), "-m", "venv", "--clear", str(folder / "venv")]
        await _once(folder / ".python", requirements.read_text(), [venv, [*pip, str(requirements)]])
    if packages.exists():
        prefix = folder / "npm"
        prefix.mkdir(parents=True, exist_ok=True)
        document = {"name": "harness", "private": True, **json.loads(packages.read_text())}
        (prefix / "package.json").write_text(json.dumps(document))
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(prefix)]
        await _once(folder / ".npm", packages.read_text(), [npm])
        path = f"{prefix / 'node_modules' / '.bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        variables = {"PATH": path, "HARNESS_NPM": str(prefix)}
    return Environment(python, variables)


async def _interpreter(module: HarnessModule) -> Path:
    """A Python that is new enough for a module. Raises `CannotRun`."""
    wanted = tuple(int(part) for part in module.python.split(".")) if module.python else (0,)
    found = newest(wanted)
    if found is not None:
        return found
    folder, source = ENVIRONMENTS / f"python{VERSION}", mirror()
    if not source or wanted > tuple(int(part) for part in VERSION.split(".")):
        have = ".".join(map(str, sys.version_info[:2]))
        raise CannotRun(f"needs Python {module.python}, here is {have}")
    await _once(folder / ".unpacked", VERSION, [unpacking(folder, source)])
    return unpacked(folder)


async def _once(stamp: Path, wanted: str, commands: list[list[str]]) -> None:
    """Run commands unless they were run for the same requirements. Raises `CannotRun`."""
    if _is_made(stamp, wanted):
        return
    for command in commands:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(INSTALL_SECONDS):
                output, _ = await process.communicate()
        except TimeoutError as error:
            process.kill()
            raise CannotRun(f"its packages were not there in {INSTALL_SECONDS} s") from error
        if process.returncode:
            last = output.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
            raise CannotRun(f"its packages cannot be installed: {last[0][:200]}")
    _made(stamp, wanted)


def _is_made(stamp: Path, wanted: str) -> bool:
    stamp.parent.mkdir(parents=True, exist_ok=True)
    return stamp.exists() and stamp.read_text() == wanted


def _made(stamp: Path, wanted: str) -> None:
    stamp.write_text(wanted)
