"""Adapters for agent harnesses, one module each. A module needs its harness; this package needs none."""
