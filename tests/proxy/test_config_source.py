"""Every problem is named by its place, with what would be right; file, environment and flags alike."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from proxy.config import Config, InvalidConfig, UpstreamConfig
from proxy.config_source import load_config, read_config, told_warnings

WRONG = """\
upstream:
  urll: http://engine:8000
  connect_seconds: soon
data: {port: 70000}
mode: often
models:
  - {name: q}
tenants:
  - name: a
    limits:
      pin: 3
retention_hour: 3
"""


def told(text: str, tmp_path: Path, environment: dict[str, str] | None = None) -> list[str]:
    path = tmp_path / "kvtether.yaml"
    path.write_text(text)
    config, problems = read_config(path, {}, environment or {})
    assert (config is None) == bool(problems)
    return [str(problem).replace(str(path), "F") for problem in problems]


def test_all_problems_are_told_at_once_with_lines_and_fixes(tmp_path: Path) -> None:
    found = sorted(told(WRONG, tmp_path))
    assert found == sorted(
        [
            "F:2: upstream.urll: no such setting; did you mean upstream.url?",
            "F:3: upstream.connect_seconds: Expected `float`, got `str` (Time limit for a connection)",
            "F:4: data.port: Expected `int` <= 65535 (TCP port; 0 picks a free one)",
            "F:5: mode: Invalid enum value 'often', one of bypass, enforce, observe is expected "
            "(Mode where no rule says otherwise)",
            "F:7: models[0].path: is missing "
            "(Directory with the tokenizer and chat template of the engine's revision)",
            "F:11: tenants[0].limits.pin: no such setting; did you mean tenants[0].limits.pins?",
            "F:12: retention_hour: no such setting; did you mean retention_hours?",
        ]
    )


def test_a_setting_in_the_wrong_section_is_pointed_to_its_own(tmp_path: Path) -> None:
    assert told("coordinator_url: http://c", tmp_path) == [
        "F:1: coordinator_url: no such setting; did you mean cache.coordinator_url?"
    ]
    (said,) = told("quux_zzz: 1", tmp_path)
    assert "docs/configuration.md" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\nb: 2", "F:2: no YAML"),
        ("mode: observe\nholdout: 0\nmode: enforce", "F:1: mode: stands there twice, also in line 3"),
        ("api_keys:\n  - {tenant: t}", "F:1: api_keys: tenant 't' needs either key_env or key_sha256"),
        ("upstream:\n  url: engine:8000", "F:2: upstream.url: not an http(s) URL"),
        ("log_url: /var/x.db", "F:1: log_url: begins with none of sqlite:///"),
        ("\nread_models_url: mysql://x", "F:2: read_models_url"),
        ("tracing:\n  endpoint: collector", "F:2: tracing.endpoint: is no http(s) URL"),
        ("data: {port: 9}\nadmin: {port: 9}", "F:2: admin.port: 9 is the data listener's"),
        ("models: [7]", "F:1: models[0]: Expected `object`"),
        ("- a", "F: a mapping is expected at the top"),
    ],
)
def test_each_kind_of_problem_has_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert any(each.startswith(said) for each in told(text, tmp_path)), told(text, tmp_path)


def test_variables_and_flags_are_named_as_what_they_are(tmp_path: Path) -> None:
    environment = {
        "KVTETHER_UPSTREAM__URLL": "x",
        "KVTETHER_DATA__PORT": "many",
        "KVTETHER_MODELS": "[",
        "KVTETHER_MODE__X": "1",
        "OTHER_KVTETHER": "1",
    }
    found = told("mode: observe", tmp_path, environment)
    assert any(
        each.startswith("KVTETHER_UPSTREAM__URLL: upstream.urll: no such setting; did you mean upstream.url")
        for each in found
    )
    assert any(each.startswith("KVTETHER_DATA__PORT: data.port: Expected `int`") for each in found)
    assert any(each.startswith("KVTETHER_MODELS: models: no YAML") for each in found)
    assert any(each.startswith("KVTETHER_MODE__X: mode.x: mode is not a section") for each in found)
    assert len(found) == 4
    _, problems = read_config(None, {"data.port": 70000}, {})
    assert str(problems[0]).startswith("--data-port: data.port")


def test_a_wrong_value_in_the_file_that_a_variable_covers_is_no_problem(tmp_path: Path) -> None:
    assert told("holdout: 7", tmp_path, {"KVTETHER_HOLDOUT": "0.5"}) == []


def test_all_of_it_is_one_error_for_a_start(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(WRONG)
    with pytest.raises(InvalidConfig) as caught:
        load_config(path, {}, {})
    assert len(str(caught.value).splitlines()) == 7


def test_the_admin_listener_keeps_its_port_when_its_host_is_set() -> None:
    config = load_config(None, {}, {"KVTETHER_ADMIN__HOST": "0.0.0.0"})
    assert (config.admin.host, config.admin.port, config.data.port) == ("0.0.0.0", 8701, 8700)


def test_what_is_allowed_and_looks_wrong_here_is_noted(tmp_path: Path) -> None:
    config = load_config(None, {"models": [{"path": str(tmp_path / "no")}], "upstream.api_key_env": "K"}, {})
    assert [text.partition(":")[0] for text in told_warnings(config, {})] == [
        "models",
        "upstream.api_key_env",
    ]
    fine = Config(upstream=UpstreamConfig(api_key_env="K"))
    assert told_warnings(fine, {"K": "k"}) == []


plain: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["upstream", "models", "mode", "modes", "limits", "tenants", "data", "holdout", "x"])


@given(st.dictionaries(NAMES, plain))
def test_no_document_breaks_the_reader(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:

    path = tmp_path_factory.mktemp("c") / "kvtether.yaml"
    path.write_text(yaml.safe_dump(document))
    config, problems = read_config(path, {}, {})
    assert (config is None) == bool(problems)
    assert all(problem.where.startswith(str(path)) for problem in problems)


def test_the_example_is_a_good_file_and_names_its_schema() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "kvtether.yaml"
    config, problems = read_config(example, {}, {})
    assert problems == []
    assert config is not None
    schema = example.read_text().splitlines()[0].partition("$schema=")[2]
    assert (example.parent / schema).resolve().exists()
