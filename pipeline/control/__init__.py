"""The control layer.

It stores the desired state of a run, and starts, changes and stops streams to match that state.
"""
