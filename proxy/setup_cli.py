"""`kvtether setup`: the settings that bring a harness to the proxy, printed, written or taken out again."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import urlsplit

import typer
from rich.console import Console

from proxy.claude_code_setup import claude_code_setup
from proxy.codex_setup import codex_setup
from proxy.opencode_setup import opencode_setup
from proxy.setup_files import Setup, SetupProblem, write_files

DEFAULT_URL = "http://127.0.0.1:8700"
MODEL_SECONDS = 2.0

console = Console()


class Harness(StrEnum):
    """Harnesses that need settings and no code."""

    CODEX = "codex"
    CLAUDE_CODE = "claude-code"
    OPENCODE = "opencode"


_SETUPS: Mapping[Harness, Callable[..., Setup]] = {
    Harness.CODEX: codex_setup,
    Harness.CLAUDE_CODE: claude_code_setup,
    Harness.OPENCODE: opencode_setup,
}


def setup(
    harness: Annotated[Harness, typer.Argument(help="Whose settings.")],
    write: Annotated[bool, typer.Option("--write", help="Write them; without it they are printed.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take out what --write put in.")] = False,
    base_url: Annotated[str, typer.Option(help="The proxy's data listener.")] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="What the engine calls its model; asked for if empty.")] = "",
) -> None:
    """Point Codex, Claude Code or opencode at the proxy, and let their hooks tell it what they do."""
    try:
        url = _base(base_url)
        name = model or ("" if remove else _served(url))
        wanted = _SETUPS[harness](os.environ, url, name, remove=remove)
        if remove or write:
            _report(wanted, write_files(wanted.files))
        else:
            _show(wanted)
    except SetupProblem as problem:
        _fail(str(problem))


def _base(url: str) -> str:
    """The proxy's address without `/v1`. Raises `SetupProblem`."""
    at = urlsplit(url)
    if at.scheme not in ("http", "https") or not at.hostname or at.query or at.fragment:
        raise SetupProblem(f"--base-url is an address like {DEFAULT_URL}, not {url!r}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _served(url: str) -> str:
    """The model that the proxy serves, if it is up and says so."""
    request = urllib.request.Request(url + "/v1/models")
    key = os.environ.get("KVTETHER_API_KEY", "")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=MODEL_SECONDS) as answer:
            listed = json.load(answer)["data"]
        return str(listed[0]["id"])
    except (OSError, urllib.error.URLError, ValueError, LookupError, TypeError):
        return ""


def _show(wanted: Setup) -> None:
    for file in wanted.files:
        _say(f"# {file.path}\n{file.added}")
    _notes(wanted)
    _say("# Nothing was written: --write puts this in beside what is there.")


def _report(wanted: Setup, written: Sequence[Path]) -> None:
    for file in wanted.files:
        if file.path not in written:
            _say(f"unchanged   {file.path}")
        else:
            kept = f", before: {file.backup}" if file.backup is not None else ""
            _say(f"{'removed' if file.after is None else 'written'}     {file.path}{kept}")
    _notes(wanted)


def _notes(wanted: Setup) -> None:
    for note in wanted.notes:
        _say(f"# {note}")


def _say(text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]{message}[/]", highlight=False, soft_wrap=True)
    raise typer.Exit(1)
