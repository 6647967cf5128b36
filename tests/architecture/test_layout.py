"""The house rules that no linter knows."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.deployment import REPOSITORY

PACKAGES = ("lifecycle", "engine_bridge", "proxy")
SDK = "sdk/kvtether"
MAX_LINES = 400
VAGUE = re.compile(r"(^|_)(utils?|helpers?|managers?|common|base|misc)(_|$)")


def modules(*packages: str) -> list[Path]:
    found = (p for package in packages for p in (REPOSITORY / package).rglob("*.py"))
    return sorted(p.relative_to(REPOSITORY) for p in found)


@pytest.mark.parametrize("path", [m for m in modules(*PACKAGES, SDK) if m.name != "__init__.py"], ids=str)
def test_every_module_has_its_test(path):
    folder = "sdk" / path.parent.relative_to(SDK) if path.is_relative_to(SDK) else path.parent
    assert (REPOSITORY / "tests" / folder / f"test_{path.name}").exists()


def test_no_module_is_too_long():
    sources = modules(*PACKAGES, SDK, "migrations", "bench", "examples", "suites", "harnesses", "tests")
    lengths = {str(m): len((REPOSITORY / m).read_text().splitlines()) for m in sources}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_module_has_a_name_that_says_nothing():
    everything = modules(*PACKAGES, SDK, "migrations", "bench", "examples", "suites", "harnesses", "tests")
    assert [str(m) for m in everything if any(VAGUE.search(part) for part in (*m.parts[:-1], m.stem))] == []


def test_packages_begin_with_a_docstring_and_hold_nothing_else():
    for path in modules(*PACKAGES, "migrations", "bench", "suites", "harnesses"):
        if path.name == "__init__.py":
            body = ast.parse((REPOSITORY / path).read_text()).body
            assert [type(node) for node in body] in ([], [ast.Expr]), path


def test_the_sdk_begins_with_its_public_names_and_nothing_else():
    body = ast.parse((REPOSITORY / SDK / "__init__.py").read_text()).body
    assert [type(node) for node in body[:1] + body[-1:]] == [ast.Expr, ast.Assign]
    assert {type(node) for node in body[1:-1]} == {ast.ImportFrom}


@pytest.mark.parametrize("name", ["base.txt", "conformance.txt", "engine.txt"])
def test_constraints_are_names_and_versions_only(name):
    for line in (REPOSITORY / "constraints" / name).read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+", line), line


def test_every_dependency_is_pinned():
    project = (REPOSITORY / "pyproject.toml").read_text()
    section = project[project.index("dependencies = [") : project.index("[project.scripts]")]
    named = set(re.findall(r'^  "([A-Za-z0-9._-]+)', section, re.MULTILINE))
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (REPOSITORY / "constraints" / "base.txt").read_text().splitlines()
    }
    assert {name.lower().replace("_", "-") for name in named} - pinned == set()
