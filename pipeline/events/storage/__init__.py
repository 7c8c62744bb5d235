"""What stays of events: records in SQLite (`store`, `store_reader`), an image and video of each (`recorder`, `clips`).

Knows records of events and the frames they are about; not who made them.
"""
