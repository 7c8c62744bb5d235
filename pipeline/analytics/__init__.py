"""Analytics: stages, which add information to results, and gates, which decide which frames the engine processes.

A stage runs between the engine and the sinks. A gate runs before the engine. Tracking, zones and counts are stages.
Motion detection is a gate. The module `stages` defines both interfaces, and the names under which a configuration can
use stages and gates. This package handles only frames and results. It does not use the engine, sinks or threads.
"""

from saccade.pipeline.analytics.stages import GATES, STAGES, ClosableStage, Gate, Stage

__all__ = ["GATES", "STAGES", "ClosableStage", "Gate", "Stage"]
