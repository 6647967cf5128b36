"""Schema of the read models, apart from the event log's: another database, and revisions of its own."""
