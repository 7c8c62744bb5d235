"""Events: rules applied to results over time.

A rule is a condition in words (`conditions`). A state machine watches it in each stream (`machine`). An event has a
begin, updates and an end, with one record for every output (`record`). The `hub` publishes events to all subscribers.
This package handles frames, results and analytics: no configuration files, servers or command line.
"""
