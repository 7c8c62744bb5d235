"""The command line: `saccade` and its commands, their options, and what they print. Its face is `main.main`."""
