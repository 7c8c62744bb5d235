"""Workers on the machines of a Ray cluster, and their supervisor there. All but `relay` needs Ray."""
