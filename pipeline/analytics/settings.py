"""The settings of what happens to results over time. Knows how settings are declared, and no frames or results."""

from __future__ import annotations

from pydantic import BaseModel

from saccade.pipeline.settings import setting


class AnalyticsSettings(BaseModel):
    """What to do with the results of a stream over time."""

    track: bool = setting(
        False,
        "Number objects over time: each keeps its number from frame to frame.",
        more="Records then have `track_id` and `speed`, and drawn boxes a number and a trail.",
    )
    track_conf: float = setting(
        0.5,
        "Least score of a box or point that begins a track; lower ones, down to conf, only carry tracks on.",
        more="A conf below it keeps a track going while its object is half hidden, as in ByteTrack.",
        metavar="SCORE",
        ge=0,
        le=1,
    )
