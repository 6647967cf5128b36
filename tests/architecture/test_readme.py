"""What the pages tell a reader to type exists, and what they point at is there."""

import ast
import re
import shlex
from urllib.parse import urlsplit

import pytest
import typer.main

from proxy.cli import app
from proxy.config import Config
from tests.architecture.deployment import REPOSITORY

README = (REPOSITORY / "README.md").read_text()
PAGES = sorted(p for p in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")])
MAKEFILE = (REPOSITORY / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    found = []
    for page in PAGES:
        for block in blocks(page.read_text(), "sh"):
            found += [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in found if words]


@pytest.mark.parametrize("words", [w for w in commands() if w[0] == "make"], ids=" ".join)
def test_make_targets_exist(words):
    assert {word for word in words[1:] if "=" not in word} <= TARGETS
    assert {word.partition("=")[0] for word in words[1:] if "=" in word} <= VARIABLES


@pytest.mark.parametrize("words", [w for w in commands() if w[0] == "kvtether"], ids=" ".join)
def test_commands_and_their_flags_exist(words):
    command, rest = typer.main.get_group(app).commands[words[1]], iter(words[2:])
    while hasattr(command, "commands"):
        command = command.commands[next(rest)]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words[2:] if word.startswith("--")} <= options


def test_there_are_commands_to_check():
    assert {"make", "kvtether"} <= {words[0] for words in commands()}


@pytest.mark.parametrize("snippet", blocks(README, "python"))
def test_the_snippets_ask_the_default_address(snippet):
    tree = ast.parse(snippet)
    (url,) = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and "http" in str(n.value))
    parts = urlsplit(str(url))
    defaults = Config()
    assert (parts.hostname, parts.port, parts.path) == (defaults.data.host, defaults.data.port, "/v1")


def test_the_example_is_as_short_as_it_says():
    lines = (REPOSITORY / "examples" / "compaction.py").read_text().splitlines()
    assert "in 60 lines" in README
    assert len(lines) <= 60


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
