from __future__ import annotations

import json

from saccade.pipeline.workers.protocol import StreamReport, WorkerReport


def test_a_report_survives_json() -> None:
    streams = (StreamReport("door", "live", frames=3, fps=2.5, settings={"detect": ["person"]}), StreamReport("a", "x"))
    report = WorkerReport(0.25, 1 << 30, streams)
    assert WorkerReport.of_message(json.loads(json.dumps(report.to_message()))) == report
