"""Pages generated from the code: `python -m proxy.documentation` writes them, a test keeps them true."""

import json
import re
from pathlib import Path

from proxy.config import ADMIN_KEY_VARIABLE, ENVIRONMENT_PREFIX, json_schema, markdown_table

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


def main() -> None:
    """Write what is not up to date."""
    readme = (REPOSITORY / "README.md").read_text()
    for name, text in pages(readme).items():
        (REPOSITORY / name).write_text(text)


if __name__ == "__main__":
    main()
