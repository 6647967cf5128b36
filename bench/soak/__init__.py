"""Load with everything that goes wrong, for minutes, and a verdict on what it left behind."""
