"""Every setting of one stream: where it comes from, what to find in it, and what becomes of the results.

Knows nothing of models, sources or sinks beyond names.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.analytics.stages import GATES, STAGES, check_names
from saccade.pipeline.config.prompts import Prompts, ShareSettings
from saccade.pipeline.config.queue_policy import QueuePolicy
from saccade.pipeline.config.stream_names import check_name
from saccade.pipeline.events.settings import EventSettings
from saccade.pipeline.settings import Address, FileText, Names, Seconds, Text, setting


class StreamConfig(AnalyticsSettings, EventSettings, ShareSettings, Prompts):
    """One stream: where it comes from, what to find in it, and how."""

    name: str | None = setting(
        None,
        "What the stream is called in its records, in topics and in file names; after its source if left out.",
        more="Letters, digits, '.', '_' and '-'.",
        metavar="NAME",
    )
    source: Address = setting(
        ..., "What to watch: a video file, an image, a folder, a live address or a webcam's number."
    )
    tiles: int = setting(
        1,
        "Divide the image into N x N overlapping tiles as well, for small objects; slower.",
        more="Each tile is as large as an image to the model: 2 finds many more small objects and costs five times the "
        "work. Meant for a GPU, for photos, or where nothing waits for the result.",
        metavar="N",
        ge=1,
        le=8,
    )
    vid_stride: int = setting(
        1,
        "Process every Nth frame of the source only.",
        more="The skipped ones are not in the output either.",
        metavar="N",
        ge=1,
    )
    start: Seconds | None = setting(None, "Where in a file to start: seconds, or 1:30.", metavar="TIME")
    end: Seconds | None = setting(None, "Where in a file to stop: seconds, or 1:30.", metavar="TIME")
    loop: bool = setting(
        False,
        "Play a file over and over at its own pace, as if it were a camera.",
        more="To try the settings of a camera with a clip: frames come in real time, the newest wins, and timestamps "
        "go on from one round to the next. A live source ignores it.",
    )
    realtime: bool = setting(
        False,
        "Play a file once at its own pace, as if it were a camera.",
        more="Frames that the model has no time for are dropped, as with a camera. A live source ignores it.",
    )
    hwaccel: Literal["auto", "cuda", "none"] = setting(
        "auto", "Decode live video on the GPU: auto (if there is one), cuda (insist) or none.", metavar="HOW"
    )
    rtsp_transport: Literal["auto", "tcp", "udp", "multicast", "http"] = setting(
        "auto",
        "How RTSP cameras send: auto, tcp, udp, multicast or http.",
        more="auto is TCP, and UDP where a camera refuses that or sends nothing; it leaves UDP where more than 1 % of "
        "the packets are lost. http is a tunnel through firewalls.",
        metavar="HOW",
    )
    loss: Literal["hide", "show"] = setting(
        "hide",
        "Frames that RTSP packets are missing from: hide or show.",
        more="hide waits for the next key frame, so that the model never sees a broken frame. show is for people who "
        "watch over a bad line: such frames are smeared, and detections on them unreliable.",
        metavar="HOW",
    )
    tls: Text = setting(
        "verify",
        "Certificates accepted from https, rtmps and rtsps sources: verify, accept or sha256:HEX.",
        more="It holds for every connection, those to segments and keys of HLS too. Certificates of cameras hardly "
        "ever match their address. sha256:HEX accepts only the one with this fingerprint, "
        "which the error message shows; accept takes any, and is no protection against interception.",
        metavar="HOW",
    )
    queue: str | None = setting(
        None,
        "Frames waiting for the model: wait, newest or keep N (by itself newest for live sources, wait for files).",
        more="`wait` holds the source back and loses none, which suits a file. `newest` keeps only the newest and "
        "`keep 8` the newest 8; what is dropped is counted, and reported in the record of the next frame.",
        metavar="POLICY",
    )
    in_flight: int = setting(
        2,
        "Frames that the model works on at a time.",
        more="Two keep it busy while results are written.",
        metavar="N",
        ge=1,
        le=64,
    )
    stages: Names = setting(
        [],
        "Stages that results pass on their way to the outputs, in this order.",
        metavar="NAME",
        flags=("--stage",),
    )
    gates: Names = setting(
        [],
        "Gates that must all admit a frame before the model is given it.",
        metavar="NAME",
        flags=("--gate",),
    )

    record: FileText | None = setting(
        None,
        "Folder where the video of a camera is recorded as it comes, with its sound; nothing is coded again.",
        more="In FOLDER/NAME/DATE/TIME.mp4, a new file every 10 minutes: `/video?segment=5m&keep=7d&max_gb=200` "
        "changes that, deletes files older than 7 days, and the oldest of a stream beyond 200 GB. A path with "
        "{stream} and a time in it, such as /video/{stream}-%Y%m%d-%H%M%S.mp4, names the files. H.264 and H.265; AAC "
        "and Opus as they are, other sound as AAC. With a record and nothing to find, a stream is only recorded.",
        metavar="FOLDER",
    )

    @property
    def nothing(self) -> str | None:
        """The complaint that there is nothing to do; None if there is something."""
        return None if self.record else super().nothing

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Every task as its skill and what is asked; also what rules name and nothing else asks for."""
        asked = super().asked
        named = {text for skill, text in asked if skill in ("detect", "point")}
        return [*asked, *(("detect", label) for label in self.rule_labels if label not in named)]

    @field_validator("name")
    @classmethod
    def _safe_name(cls, value: str | None) -> str | None:
        return None if value is None else check_name(value)

    @field_validator("stages")
    @classmethod
    def _known_stages(cls, value: list[str]) -> list[str]:
        return check_names(value, STAGES)

    @field_validator("gates")
    @classmethod
    def _known_gates(cls, value: list[str]) -> list[str]:
        return check_names(value, GATES)

    @field_validator("queue")
    @classmethod
    def _queue_policy(cls, value: str | None) -> str | None:
        if value is not None:
            QueuePolicy.parse(value)
        return value

    @field_validator("end")
    @classmethod
    def _after_start(cls, value: float | None, info: Any) -> float | None:
        start = info.data.get("start")
        if value is not None and start is not None and value <= start:
            raise ValueError(f"should be later than start, {start:g} s")
        return value


class ListedStream(StreamConfig):
    """One of several streams, with outputs of its own."""

    sinks: list[FileText] = setting([], "Where its results go, besides the outputs of all streams.")
