"""The shell: HTTP in, HTTP out, and everything built by name."""
