"""Stores events: records in SQLite (`store`, `store_reader`), media files in a folder (`recorder`, `clips`)."""
