"""The command line: `saccade`, its commands, their options and output. The entry point is `main.main`."""
