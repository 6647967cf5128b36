"""Pure rules: observations in, events and directives out. No I/O, clock, randomness or logging."""
