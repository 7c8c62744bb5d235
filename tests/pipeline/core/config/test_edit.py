from __future__ import annotations

from pathlib import Path

import pytest

from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.core.config.edit import save_regions
from saccade.pipeline.core.config.file import load
from saccade.pipeline.core.errors import ConfigError

FILE = """\
# The cameras of the shop.
streams:
  - name: hall   # over the entrance
    source: "rtsp://192.0.2.7/a"
    zones:
      # where people wait
      queue: .1,.2,.5,.2,.5,.9
      desk: {polygon: '.6,.2,.9,.2,.9,.9', loitering: 10}   # the desk
  - name: yard
    source: rtsp://192.0.2.8/a
detect: [person] # of all
"""


def test_only_what_is_other_is_written(tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(FILE)
    hall, _ = load(path, {}).each()
    same = Regions(zones=hall.zones, lines=hall.lines)
    save_regions(path, {0: same, 1: Regions()})
    assert path.read_text() == FILE
    changed = Regions.model_validate({"zones": {"desk": hall.zones["desk"]}, "lines": {"gate": "0,0.5,1,0.5"}})
    save_regions(path, {0: changed, 1: Regions.model_validate({"zones": {"yard": ".1,.1,.9,.1,.9,.9"}})})
    text = path.read_text()
    assert [comment in text for comment in ("# The cameras", "# over the entrance", "# the desk", "# of all")] == [
        True
    ] * 4
    assert "queue" not in text
    hall, yard = load(path, {}).each()
    assert (hall.zones, hall.lines) == (changed.zones, changed.lines)
    assert yard.zones["yard"].polygon == [(0.1, 0.1), (0.9, 0.1), (0.9, 0.9)]


def test_one_source_has_them_at_the_top(tmp_path: Path) -> None:
    path = tmp_path / "camera.yaml"
    path.write_text("source: '0' # the webcam\ndetect: person\nzones: ['door=.1,.1,.9,.1,.9,.9']\n")
    wanted = Regions.model_validate({"zones": {"door": {"polygon": ".2,.1,.9,.1,.9,.9", "classes": ["person"]}}})
    save_regions(path, {None: wanted})
    assert load(path, {}).zones == wanted.zones
    assert "# the webcam" in path.read_text()
    save_regions(path, {None: Regions()})
    assert "zones" not in path.read_text()


@pytest.mark.parametrize("text", ["", "streams: []\n", "streams: 3\n", "a: [\n"])
def test_a_file_of_another_shape_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cameras.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="changed meanwhile"):
        save_regions(path, {0: Regions.model_validate({"zones": {"door": ".1,.1,.9,.1,.9,.9"}})})
    assert path.read_text() == text
    assert [one.name for one in tmp_path.iterdir()] == ["cameras.yaml"]
