"""How steps follow each other: the tick, the thread that runs it, and the threads that cut images meanwhile."""
