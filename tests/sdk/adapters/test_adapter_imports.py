"""An adapter without its harness says which package is missing."""

import importlib
import sys

import pytest

HARNESSES = {
    "google_adk": ("google.adk", "google-adk litellm"),
    "mini_swe_agent": ("minisweagent", "mini-swe-agent"),
    "openhands": ("openhands", "openhands-sdk"),
    "smolagents": ("smolagents", "'smolagents[openai]'"),
    "strands": ("strands", "'strands-agents[openai]'"),
}


@pytest.mark.parametrize("adapter", HARNESSES)
def test_it_names_the_package_to_install(adapter, monkeypatch):
    library, package = HARNESSES[adapter]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError) as told:
        importlib.import_module(f"kvtether.adapters.{adapter}")
    assert str(told.value).endswith(f"pip install {package}")


def test_the_sdk_needs_no_harness():
    assert importlib.import_module("kvtether.adapters").__doc__
