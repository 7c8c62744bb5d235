"""Which step comes next and who holds what: pure bookkeeping, no torch and no threads."""
