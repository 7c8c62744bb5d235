"""What developers time: steps, drafts and prompts. `python -m benchmarks --help`; not in the wheel."""
