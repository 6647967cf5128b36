"""Everything that knows how an engine and its KV cache name, store and free tokens."""
