"""`kvtether backends`: which engines a running proxy has, and taking one out of service."""

from typing import Annotated, Any, NoReturn
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from proxy.admin_client import DEFAULT_ADMIN, AdminError, AdminKey, AdminUrl, ask

backends_app = typer.Typer(no_args_is_help=True, help="List the engines behind a proxy; drain one.")
console = Console()

Name = Annotated[str, typer.Argument(metavar="NAME", help="As `kvtether backends list` shows it.")]


@backends_app.command(name="list")
def list_backends(admin: AdminUrl = DEFAULT_ADMIN, admin_key: AdminKey = "") -> None:
    """Print every engine: how it is, what it serves, and what it has to do."""
    table = Table("name", "state", "calls", "contexts", "models", "url", "reason", box=None)
    for each in _ask("GET", f"{admin}/kv/v1/backends", admin_key)["items"]:
        models = "?" if each["models"] is None else " ".join(each["models"])
        counts = str(each["calls"]), str(each["contexts"])
        table.add_row(each["name"] or "-", each["state"], *counts, models, each["url"], each["reason"])
    console.print(table, highlight=False)


@backends_app.command()
def drain(name: Name, admin: AdminUrl = DEFAULT_ADMIN, admin_key: AdminKey = "") -> None:
    """No new contexts for it, and those it has go elsewhere with their next call. `resume` ends it."""
    said = _ask("POST", f"{admin}/kv/v1/backends/{quote(name, safe='')}/drain", admin_key)
    console.print(
        f"{name} drains: {said['calls']} calls under way, {said['contexts']} contexts", highlight=False
    )


@backends_app.command()
def resume(name: Name, admin: AdminUrl = DEFAULT_ADMIN, admin_key: AdminKey = "") -> None:
    """Let it take new contexts again."""
    said = _ask("POST", f"{admin}/kv/v1/backends/{quote(name, safe='')}/resume", admin_key)
    console.print(f"{name} is {said['state']}", highlight=False)


def _ask(method: str, url: str, key: str) -> dict[str, Any]:
    try:
        return ask(method, url, key)
    except AdminError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    console.print(f"[red]error[/] {message}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)
