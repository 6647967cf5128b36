"""Adapters of the EventLog port."""
