"""The command line `saccade`: its commands, options and output. The entry point is `main.main`."""
