"""How images come to a GPU together: where they wait, and how they are sent and cut."""
