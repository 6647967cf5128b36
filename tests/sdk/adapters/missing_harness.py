"""What an adapter says where its harness is not installed."""

import importlib
import sys

import pytest


def import_without(harness: str, adapter: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Import an adapter as if the harness were not there; answers what it says."""
    monkeypatch.setitem(sys.modules, harness, None)
    monkeypatch.delitem(sys.modules, f"kvtether.adapters.{adapter}", raising=False)
    with pytest.raises(ImportError) as told:
        importlib.import_module(f"kvtether.adapters.{adapter}")
    return str(told.value)
