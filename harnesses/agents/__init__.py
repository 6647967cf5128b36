"""Drivers, one a harness; each runs in an environment of that harness's own."""
