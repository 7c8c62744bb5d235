"""Storage of events: records in SQLite (`store`, `store_reader`), snapshots and clips (`recorder`, `clips`)."""
