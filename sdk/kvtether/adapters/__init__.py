"""Adapters for agent harnesses, one module each. A module needs its harness installed, this package none."""
