"""Read models over the event log, mutated in place and rebuilt from it."""
