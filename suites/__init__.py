"""Test suites that others wrote, run directly against vLLM and through the proxy: the verdicts must agree."""
