"""Several engine processes that serve one set of streams: a supervisor, workers, and which stream runs where."""
