"""`kvtether demo`: one workload twice through the proxy and the embedded engine, side by side."""
