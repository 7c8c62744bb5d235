"""Tracking quality on MOT Challenge sequences: file formats, and the metrics MOTA, IDF1, HOTA and identity switches."""
