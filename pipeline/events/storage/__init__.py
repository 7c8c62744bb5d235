"""Stores events: records in SQLite (`store`, `store_reader`), and media files in a folder (`recorder`, `clips`)."""
