"""The domain: what is alive, waiting or dead. No HTTP, no engine."""
