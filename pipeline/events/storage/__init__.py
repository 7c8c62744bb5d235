"""Stores events: records in SQLite (`store`, `store_reader`), clips and snapshots in files (`recorder`, `clips`)."""
