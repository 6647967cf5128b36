"""Settings files of harnesses, changed so that nothing of their owner's is lost."""

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

BACKUP_SUFFIX = ".kvtether.bak"
"""What a file is called that holds what its owner had before the last change."""


class SetupProblem(Exception):
    """Nothing was changed; the message says why, and what to do."""


class SettingsFile(msgspec.Struct, frozen=True):
    """A file as it is, and as it should be. None: there is none.

    `added` is what our part of it looks like by itself, for reading. `had_ours`: what is there holds our part
    already, and is no file of its owner's to go back to.
    """

    path: Path
    before: str | None
    after: str | None
    added: str = ""
    had_ours: bool = False

    @property
    def changes(self) -> bool:
        return self.before != self.after

    @property
    def backup(self) -> Path | None:
        """Where what is there will be kept, if it will."""
        if self.before is None or self.had_ours or not self.changes:
            return None
        return self.path.with_name(self.path.name + BACKUP_SUFFIX)


class Setup(msgspec.Struct, frozen=True):
    """What a harness needs, and what its user should know about it."""

    files: tuple[SettingsFile, ...]
    notes: tuple[str, ...] = ()


def read_text(path: Path) -> str | None:
    """A file's text, None if there is no file. Raises `SetupProblem`."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise SetupProblem(f"{path} cannot be read: {error}") from error


def read_object(path: Path, text: str | None) -> dict[str, Any]:
    """The JSON object that a file holds; an absent or empty one holds none. Raises `SetupProblem`."""
    if text is None or not text.strip():
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SetupProblem(
            f"{path} is no plain JSON ({error}): correct it, or put in by hand what setup prints"
        ) from error
    if not isinstance(document, dict):
        raise SetupProblem(f"{path} holds no JSON object")
    return document


def inner_object(path: Path, document: dict[str, Any], name: str) -> dict[str, Any]:
    """The object under a name, put there if it is absent. Raises `SetupProblem` if something else is."""
    inner = document.setdefault(name, {})
    if not isinstance(inner, dict):
        raise SetupProblem(f"{path}: {name} is no object")
    return inner


def write_object(document: dict[str, Any]) -> str:
    """The text of a JSON settings file."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def rewritten(path: Path, before: str | None, document: dict[str, Any]) -> str | None:
    """A settings file's text with this content: as it is, if it says the same; None where nothing is left."""
    if before is not None and read_object(path, before) == document:
        return before
    return write_object(document) if document else None


def write_files(files: Sequence[SettingsFile]) -> list[Path]:
    """Write what changes, each file whole or not at all; answers which. Raises `SetupProblem`.

    What its owner had is kept beside it. Links are followed.
    """
    written: list[Path] = []
    for file in files:
        if not file.changes:
            continue
        path = file.path.resolve()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if file.backup is not None:
                _replace(file.backup, file.before or "", path)
            if file.after is None:
                path.unlink()
            else:
                _replace(path, file.after, path)
        except OSError as error:
            done = ", ".join(str(each) for each in written) or "nothing"
            raise SetupProblem(f"{path} cannot be written: {error}; changed: {done}") from error
        written.append(file.path)
    return written


def _replace(path: Path, text: str, like: Path) -> None:
    """Put a file in place in one step, with the permissions of `like` if that is there."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        if like.exists():
            os.chmod(name, like.stat().st_mode & 0o7777)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
