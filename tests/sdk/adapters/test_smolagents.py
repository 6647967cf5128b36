"""smolagents: without it, the adapter says what is missing. With it: harnesses/contracts."""

from tests.sdk.adapters.missing_harness import import_without


def test_it_names_the_package_to_install(monkeypatch):
    assert import_without("smolagents", "smolagents", monkeypatch).endswith(
        "pip install 'smolagents[openai]'"
    )
