"""Experiments: seeded, warm-up excluded."""
