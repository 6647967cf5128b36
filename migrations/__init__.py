"""Schema of the embedded database, one revision a file in `versions/`; applied when it is opened."""
