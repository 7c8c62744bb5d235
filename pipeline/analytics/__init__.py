"""What happens between engine and sinks, over time: stages that change results, and gates that choose frames.

`stages` holds the two Protocols and the tables that name every stage and gate of a configuration. Trackers, zones and
counts are stages; a motion detector is a gate. Each lives in a file of its own here and knows frames and results only:
no engine, no sink, no threads.
"""

from saccade.pipeline.analytics.stages import GATES, STAGES, ClosableStage, Gate, Stage

__all__ = ["GATES", "STAGES", "ClosableStage", "Gate", "Stage"]
