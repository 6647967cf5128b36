"""Generated pages are what the code says now, and only what lies between the README's marks is written."""

import json

import jsonschema

from proxy.documentation import README_BEGIN, README_END, REPOSITORY, markdown_table, pages


def test_every_generated_page_is_up_to_date():
    for name, text in pages((REPOSITORY / "README.md").read_text()).items():
        assert (REPOSITORY / name).read_text() == text, f"{name}: run `make docs`"


def test_the_readme_has_a_place_for_the_settings():
    readme = (REPOSITORY / "README.md").read_text()
    assert readme.count(README_BEGIN) == readme.count(README_END) == 1
    assert "| `upstream.url` |" in readme


def test_nothing_around_the_marks_changes():
    readme = f"before\n{README_BEGIN}old\n{README_END}after\n"
    written = pages(readme)["README.md"]
    assert written.startswith(f"before\n{README_BEGIN}| setting |")
    assert written.endswith(f"|\n{README_END}after\n")
    assert pages(written)["README.md"] == written


def test_the_schema_tells_a_good_file_from_a_bad_one():
    schema = json.loads((REPOSITORY / "kvtether.schema.json").read_text())
    good = {"upstream": {"url": "http://vllm:8000"}, "models": [{"path": "/model"}], "mode": "enforce"}
    jsonschema.validate(good, schema)
    checker = jsonschema.Draft202012Validator(schema)
    for bad in ({"mode": "delete"}, {"upstream": {"urll": "x"}}, {"models": [{}]}, {"holdout": 2}):
        assert not checker.is_valid(bad), bad


def test_every_setting_is_in_the_table() -> None:
    table = markdown_table()
    named = ("data.port", "admin.port", "upstream.url", "upstreams[].url", "models[].path", "log_url")
    for name in (*named, "api_keys[].tenant"):
        assert f"`{name}`" in table
    assert all(line.count("|") == 4 for line in table.strip().splitlines())
    assert "8701" in table
