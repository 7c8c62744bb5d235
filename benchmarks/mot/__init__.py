"""Measures tracking quality on MOT Challenge sequences, with the metrics MOTA, IDF1, HOTA and identity switches."""
