"""An engine and its cache in this process: no GPU, no weights, real tokens, keys, events and answers."""
