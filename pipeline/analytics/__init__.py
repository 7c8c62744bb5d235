"""Analytics stages, which change results between the engine and the sinks, and gates, which select frames.

`stages` holds both Protocols and the tables of the stages and gates that a configuration can name. Trackers, zones and
counts are stages; the motion detector is a gate. This package handles only frames and results: no engine, no sinks and
no threads.
"""

from saccade.pipeline.analytics.stages import GATES, STAGES, ClosableStage, Gate, Stage

__all__ = ["GATES", "STAGES", "ClosableStage", "Gate", "Stage"]
