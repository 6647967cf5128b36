"""Pages generated from the code: `python -m proxy.documentation` writes them, a test keeps them true."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from proxy.config import ADMIN_KEY_VARIABLE, ENVIRONMENT_PREFIX, Config, json_schema

REPOSITORY = Path(__file__).resolve().parents[1]
README_BEGIN = "<!-- configuration: written by `make docs` -->\n"
README_END = "<!-- end of configuration -->\n"

_PAGE = f"""# Configuration

Written by `make docs` from `proxy/config.py`; edit the code, not this page.

Settings come from `kvtether.yaml` in the working directory (or `--config`), environment variables and
flags; the later ones win. `{ENVIRONMENT_PREFIX}UPSTREAM__URL` sets `upstream.url`: two underscores step
into a section, and the value is read as YAML. `name[].field` is a field of each entry of a list. An unknown
setting stops the start; `kvtether config validate` names every problem with its line. `kvtether.schema.json`
says the same to editors (`kvtether config schema` prints it), by a first line of the file:
`# yaml-language-server: $schema=./kvtether.schema.json`. What a running proxy takes over without a restart:
[operations.md](operations.md).

Secrets never stand in the file: a setting that ends in `_env` names the environment variable that holds one.
Choose a name that does not begin with `{ENVIRONMENT_PREFIX}`. `{ADMIN_KEY_VARIABLE}` is read by the commands
that ask a running proxy, not by the proxy.

"""


def pages(readme: str) -> dict[str, str]:
    """Every generated file by its path in the repository; `readme` is the README as it stands."""
    table = markdown_table()
    section = re.compile(f"(?<={re.escape(README_BEGIN)}).*?(?={re.escape(README_END)})", re.DOTALL)
    return {
        "docs/configuration.md": _PAGE + table,
        "kvtether.schema.json": json.dumps(json_schema(), indent=2) + "\n",
        "README.md": section.sub(lambda _: table, readme),
    }


def markdown_table() -> str:
    """Every setting with type, default and meaning, for the documentation."""
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    rows += _rows(Config, "")
    return "\n".join(rows) + "\n"


def _rows(struct: type[msgspec.Struct], prefix: str) -> list[str]:
    rows = []
    for field in msgspec.structs.fields(struct):
        inner, text = _unwrap(field.type)
        name = f"{prefix}{field.encode_name}"
        item = _item_struct(inner)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            rows += _rows_with_defaults(inner, name, field.default)
        elif item is not None:
            rows += _rows(item, f"{name}[].")
        else:
            default = field.default if field.default is not msgspec.NODEFAULT else "required"
            default = default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            rows.append(f"| `{name}` | `{_plain(default)}` | {text} |")
    return rows


def _rows_with_defaults(struct: type[msgspec.Struct], name: str, default: Any) -> list[str]:
    rows = []
    for field in msgspec.structs.fields(struct):
        _, text = _unwrap(field.type)
        value = getattr(default, field.name)
        rows.append(f"| `{name}.{field.encode_name}` | `{_plain(value)}` | {text} |")
    return rows


def _unwrap(kind: Any) -> tuple[Any, str]:
    metadata = getattr(kind, "__metadata__", ())
    text = next((m.description for m in metadata if isinstance(m, msgspec.Meta) and m.description), "")
    return getattr(kind, "__origin__", kind) if metadata else kind, text


def _item_struct(kind: Any) -> type[msgspec.Struct] | None:
    item = next(iter(getattr(kind, "__args__", ())), None)
    return item if isinstance(item, type) and issubclass(item, msgspec.Struct) else None


def _plain(value: Any) -> str:
    if value is None:
        return "unset"
    if value in ((), {}, ""):
        return "empty"
    return str(value)


def main() -> None:
    """Write what is not up to date."""
    readme = (REPOSITORY / "README.md").read_text()
    for name, text in pages(readme).items():
        (REPOSITORY / name).write_text(text)


if __name__ == "__main__":
    main()
