"""Messages to token ranges: spans, resumable rendering, incremental tokens."""
