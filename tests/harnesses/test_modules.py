import sys

import pytest

from harnesses.modules import AGENTS, CannotRun, code_lines, modules, prepare, read_module


def test_every_module_says_what_it_is():
    found = modules()
    assert len(found) == len([p for p in AGENTS.glob("*.py") if p.stem != "__init__"])
    for each in found:
        assert each.api in ("chat", "responses", "messages"), each.name
        assert each.integration in ("none", "SDK", "adapter", "hooks", "settings", "plugin"), each.name


def test_lines_are_counted_between_the_marks_without_blanks_comments_and_docstrings():
    source = '''
import x
# integration begins
import kvtether

def hook(request):
    """Says what it is
    in two lines."""
    # and why
    return kvtether.headers(
        request
    )
# integration ends
other = 1
# integration begins
more = """a text
that counts"""
# integration ends
'''
    assert code_lines(source) == 1 + 1 + 3 + 2
    assert code_lines("x = 1\n") == 0


def test_settings_count_as_they_were_written(tmp_path):
    path = tmp_path / "one.py"
    path.write_text('NAME = "one"\nSETTINGS = "conf/settings.toml"\n')
    (tmp_path / "conf").mkdir()
    module = read_module(path)
    assert module.lines(tmp_path) == 0
    (tmp_path / "conf" / "settings.toml").write_text("a = 1\n\nb = 2\n")
    assert module.lines(tmp_path) == 2


def test_a_file_that_names_no_harness_is_none(tmp_path):
    path = tmp_path / "one.py"
    path.write_text("raise RuntimeError('it was imported')\n")
    assert read_module(path) is None


async def test_what_cannot_run_here_says_why(tmp_path):
    path = tmp_path / "one.py"
    path.write_text('NAME = "no such harness"\nPYTHON = "99.1"\n')
    with pytest.raises(CannotRun, match=r"needs Python 99\.1"):
        await prepare(read_module(path))


async def test_a_module_without_packages_runs_by_our_own_interpreter(tmp_path):
    path = tmp_path / "one.py"
    path.write_text('NAME = "no such harness"\n')
    assert str((await prepare(read_module(path))).python) == sys.executable
