"""How good tracks are, on sequences of the MOT Challenge: their files, and MOTA, IDF1, HOTA and identity switches."""
