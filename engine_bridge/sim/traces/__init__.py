"""Recorded agent traces: token counts and lifecycle events without text, read, cut to size, and made up."""
