"""The control layer of a run.

It stores the desired state of the streams, and starts, changes and stops streams to match this state.
"""
