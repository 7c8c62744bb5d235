"""HTTP: the demo, streams added and removed while it runs, WHEP, metrics and health."""
