"""Agent harnesses driven through one task before the proxy, and what the proxy saw of it."""
