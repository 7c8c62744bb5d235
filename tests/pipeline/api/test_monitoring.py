"""The dashboard and the alerts ask for metrics that there are, with labels that they have."""

from __future__ import annotations

import json
import re

import yaml
from prometheus_client.parser import text_string_to_metric_families

from saccade.engine import Engine
from saccade.pipeline.api.prometheus import Metrics
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import StreamConfig
from saccade.pipeline.control.local import Local
from saccade.pipeline.runtime.streams import Streams
from tests.support import REPO
from tests.support.control import controller_of
from tests.support.webrtc import until

FOLDER = REPO / "configs" / "monitoring"


def expressions() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana.json").read_text())
    alerts = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    return [*shown, *variables, *(rule["expr"] for group in alerts["groups"] for rule in group["rules"])]


def test_every_metric_asked_for_exists() -> None:
    with Engine.load("nano", device="cpu") as engine, Streams(engine) as streams:
        config = {"zones": {"z": ".1,.1,.9,.1,.9,.9"}, "lines": {"l": "0,.5,1,.5"}, "detect": ["person"]}
        controller = controller_of(streams)
        controller.add(StreamConfig.model_validate({"source": str(DEMO_CLIP), "name": "hall", **config}))
        until(lambda: controller.runner.status("hall").report.frames > 2, seconds=60)
        families = list(text_string_to_metric_families(Metrics(Local(streams)).as_text().decode()))
        local = Local(streams)
        local.events.hub.dropped = 3
        lost = Metrics(local).as_text().decode()
    assert 'saccade_event_changes_dropped_total{where="hub"} 3.0' in lost
    known = {family.name for family in families} | {sample.name for family in families for sample in family.samples}
    known |= {f"{family.name}_total" for family in families if family.type == "counter"}
    labels = {label for family in families for sample in family.samples for label in sample.labels}
    for expression in expressions():
        asked = set(re.findall(r"\b(?:saccade|process)_\w+", expression))
        assert asked - known == set(), expression
        used = set(re.findall(r"[{,]\s*(\w+)\s*(?:=~|!=|=)", expression)) - {"job"}
        assert used <= labels | {"cause", "stream"}, expression
        assert expression.count("(") == expression.count(")")
