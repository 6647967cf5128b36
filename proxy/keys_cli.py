"""`kvtether keys`: who may call. Works on the keys file; a running proxy takes the change over by itself."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from proxy.auth import DEFAULT_TENANT, KeyScope
from proxy.config import DEFAULT_FILE, DEFAULT_KEYS_FILE, InvalidConfig
from proxy.config_source import load_config
from proxy.keys import InvalidKeys, KeyFile, create_key, read_keys, revoke_key
from proxy.system import SystemClock

keys_app = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys.")
console = Console()
aside = Console(stderr=True)

ConfigFile = Annotated[Path | None, typer.Option("--config", help="Default: kvtether.yaml if it is there.")]
KeysFile = Annotated[
    Path | None, typer.Option("--file", help="The keys file; default: the one that the configuration names.")
]


@keys_app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whose calls it opens.")] = DEFAULT_TENANT,
    scope: Annotated[KeyScope, typer.Option(help="admin includes call.")] = KeyScope.CALL,
    config: ConfigFile = None,
    file: KeysFile = None,
) -> None:
    """Make a key. It is printed once, alone on standard output; only its hash is kept."""
    path = _path(config, file)
    try:
        record, key, first = create_key(path, tenant, frozenset({scope}), SystemClock().now_ns())
    except InvalidKeys as error:
        _fail(str(error))
    aside.print(
        f"key {record.id} of tenant {record.tenant} ({', '.join(record.scopes)}) in {path}", highlight=False
    )
    if first:
        aside.print(
            "it is the first: a proxy that reads this file serves nobody without a key from now on",
            highlight=False,
        )
    console.print(key, highlight=False, soft_wrap=True, markup=False)


@keys_app.command(name="list")
def list_keys(config: ConfigFile = None, file: KeysFile = None) -> None:
    """Print every key that was made: who, what for, when, and when it was revoked."""
    path = _path(config, file)
    try:
        known: KeyFile = read_keys(path)
    except FileNotFoundError:
        _fail(f"{path} is not there: no key was made yet")
    except InvalidKeys as error:
        _fail(str(error))
    table = Table("id", "tenant", "scopes", "created", "revoked", box=None)
    for record in known.keys:
        revoked = record.revoked.isoformat(timespec="seconds") if record.revoked else ""
        created = record.created.isoformat(timespec="seconds")
        table.add_row(record.id, record.tenant, " ".join(record.scopes), created, revoked)
    console.print(table, highlight=False)


@keys_app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `kvtether keys list` shows it.")],
    config: ConfigFile = None,
    file: KeysFile = None,
) -> None:
    """Make a key worthless. Its entry stays in the list."""
    try:
        record = revoke_key(_path(config, file), key_id, SystemClock().now_ns())
    except InvalidKeys as error:
        _fail(str(error))
    console.print(f"key {record.id} of tenant {record.tenant} is revoked", highlight=False)


def _path(config: Path | None, file: Path | None) -> Path:
    if file is not None:
        return file
    if config is None and DEFAULT_FILE.exists():
        config = DEFAULT_FILE
    try:
        return Path(load_config(config).keys_file or DEFAULT_KEYS_FILE)
    except InvalidConfig as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    aside.print(f"[red]error[/] {message}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)
