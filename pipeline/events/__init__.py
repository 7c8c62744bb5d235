"""Events: evaluates rules on the results of a stream over time.

`conditions` parses the condition of a rule. `machine` evaluates one rule in one stream as a state machine. `record`
defines the event, which has a begin, updates and an end, and its JSON record. `hub` publishes events to all
subscribers.

The package handles frames, results and analytics. It does not depend on configuration files, servers or the command
line.
"""
