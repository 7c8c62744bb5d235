"""Workers on the machines of a Ray cluster, and the supervisor there. Only what ends in `_actor` or `ray_` needs Ray."""
