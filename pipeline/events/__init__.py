"""Events: what rules make of results over time, and what becomes of it.

A rule is a condition in words (`conditions`), watched in a stream by a state machine (`machine`). What it begins,
changes and ends is an event with one record for every wire (`record`), handed to all that take events by the `hub`.
Knows frames, results and analytics; no configuration files, no servers, no command line.
"""
