"""The real stack on one machine without a GPU: vLLM on the CPU, an LMCache server and its coordinator."""
