"""How images come to a GPU: where they wait, and how they are sent and cut, together or alone."""
