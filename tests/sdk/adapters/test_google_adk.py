"""Google ADK: what the adapter says without it. With it: harnesses/contracts."""

from tests.sdk.adapters.missing_harness import import_without


def test_it_names_the_package_to_install(monkeypatch):
    told = import_without("google.adk", "google_adk", monkeypatch)
    assert told.endswith("pip install google-adk litellm")
