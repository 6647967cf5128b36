"""Revisions, oldest first. Each states both directions."""
