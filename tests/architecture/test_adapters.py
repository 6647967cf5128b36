"""Adapters of harnesses stay small, and each has its page and its contract."""

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.deployment import REPOSITORY

MAX_OWN_LINES = 40
ADAPTERS = sorted(
    p for p in (REPOSITORY / "sdk" / "kvtether" / "adapters").glob("*.py") if p.stem != "__init__"
)


def own_lines(source: str) -> int:
    """Lines of code: no blanks, no comments, no docstrings, no imports, guarded ones included."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = node.body if isinstance(node, ast.Try) else [node]
        imports = all(isinstance(each, ast.Import | ast.ImportFrom) for each in body)
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if imports or (text and isinstance(node.value.value, str)):
            left_out |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), start=1)
    return sum(n not in left_out and bool(text := line.strip()) and text[0] != "#" for n, line in lines)


def test_lines_of_code_are_counted():
    source = (
        '"""What\nit is."""\n\ntry:\n    import a\nexcept ImportError:\n    pass\n\n# why\nx = (\n    1,\n)\n'
    )
    assert own_lines(source) == 3


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_an_adapters_own_code_is_small(path: Path):
    assert own_lines(path.read_text()) <= MAX_OWN_LINES


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_an_adapter_has_a_contract_and_a_page_of_what_is_exact_and_what_is_not(path: Path):
    name = path.stem.replace("_", "-")
    assert (REPOSITORY / "harnesses" / "contracts" / f"{path.stem}_contract.py").exists()
    page = (REPOSITORY / "docs" / "adapters" / f"{name}.md").read_text()
    assert re.search(rf"kvtether\.adapters\.{path.stem}", page)
    assert "```python" in page
    assert re.search(r"cannot know", page, re.IGNORECASE)
    pinned = dict(
        line.split("==", 1)
        for line in (REPOSITORY / "constraints" / "harnesses" / f"{name}.txt").read_text().splitlines()
        if "==" in line
    )
    assert any(version in page and package in page for package, version in pinned.items())
