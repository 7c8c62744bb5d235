"""What many workers carry: measured on this machine, and simulated for more than it has."""
