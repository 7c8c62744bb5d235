"""Events: evaluates the rules of a stream on its results over time.

`conditions` parses the condition of a rule. `machine` is the state machine that evaluates one rule in one stream.
`record` defines the event, which has a begin, updates and an end, and its JSON record. `hub` publishes events to all
subscribers.

The package depends on frames, results and analytics, but not on configuration files, servers or the command line.
"""
