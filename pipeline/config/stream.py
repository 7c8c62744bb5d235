"""The settings of one stream: source, prompts and processing of results."""

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
    """The settings of one stream."""

    name: str | None = setting(
        None,
        "Name of the stream in records, topics and file names; by default, its source.",
        more="Letters, digits, '.', '_' and '-'.",
        metavar="NAME",
    )
    source: Address = setting(
        ..., "What to watch: a video file, an image, a folder, a live address or a webcam's number."
    )
    tiles: int = setting(
        1,
        "Also process N x N overlapping tiles of the image, for small objects; slower.",
        more="Each tile costs as much as an image. 2 finds many more small objects at five times the cost. "
        "Use it on a GPU, for photos, or without a time limit.",
        metavar="N",
        ge=1,
        le=8,
    )
    vid_stride: int = setting(
        1,
        "Process every Nth frame of the source only.",
        more="Outputs omit the skipped frames too.",
        metavar="N",
        ge=1,
    )
    start: Seconds | None = setting(None, "Start time in a file: seconds, or 1:30.", metavar="TIME")
    end: Seconds | None = setting(None, "End time in a file: seconds, or 1:30.", metavar="TIME")
    loop: bool = setting(
        False,
        "Play a file in a loop and in real time, like a camera.",
        more="Use it to test camera settings with a clip. Frames arrive in real time, the newest frame wins, "
        "and timestamps continue from one round to the next. Live sources ignore it.",
    )
    realtime: bool = setting(
        False,
        "Play a file once and in real time, like a camera.",
        more="Frames are dropped while the model is busy, as with a camera. Live sources ignore it.",
    )
    hwaccel: Literal["auto", "cuda", "none"] = setting(
        "auto", "Decode live video on the GPU: auto (if present), cuda (required) or none.", metavar="HOW"
    )
    rtsp_transport: Literal["auto", "tcp", "udp", "multicast", "http"] = setting(
        "auto",
        "RTSP transport: auto, tcp, udp, multicast or http.",
        more="auto uses TCP, or UDP if the camera refuses TCP or sends nothing. It leaves UDP if more than 1 "
        "% of the packets are lost. http is a tunnel through firewalls.",
        metavar="HOW",
    )
    loss: Literal["hide", "show"] = setting(
        "hide",
        "RTSP frames with missing packets: hide or show.",
        more="hide waits for the next key frame, so the model never sees a broken frame. show is for viewers "
        "on a bad network: frames are smeared, and detections on them are unreliable.",
        metavar="HOW",
    )
    tls: Text = setting(
        "verify",
        "Certificates accepted from https, rtmps and rtsps sources: verify, accept or sha256:HEX.",
        more="It applies to every connection, also to segments and keys of HLS. Certificates of cameras "
        "rarely match their address. sha256:HEX accepts only the certificate with this fingerprint; the "
        "error message prints it. accept takes any certificate and does not protect against interception.",
        metavar="HOW",
    )
    queue: str | None = setting(
        None,
        "Queue of frames for the model: wait, newest or keep N (default: newest for live sources, wait for files).",
        more="`wait` applies backpressure to the source and drops nothing; use it for files. `newest` keeps "
        "only the newest frame, and `keep 8` the newest 8. The next record reports the number of dropped "
        "frames.",
        metavar="POLICY",
    )
    in_flight: int = setting(
        2,
        "Frames of a stream in the model at a time.",
        more="Two keep the model busy while results are written.",
        metavar="N",
        ge=1,
        le=64,
    )
    stages: Names = setting(
        [],
        "Stages for results, in this order.",
        metavar="NAME",
        flags=("--stage",),
    )
    gates: Names = setting(
        [],
        "Gates for frames; the model processes a frame only if all gates admit it.",
        metavar="NAME",
        flags=("--gate",),
    )

    record_source: Address | None = setting(
        None,
        "A second stream of the same camera, with larger images, for recordings, clips and snapshots.",
        more="`source` is the camera's small stream, which is analysed. The second stream is only opened for `record` "
        "or for events with `store`, and is not decoded. Its loss does not stop detection. The RTCP reports of both "
        "streams align clips and snapshots to a frame. An onvif:// address chooses the largest profile.",
        metavar="SOURCE",
    )
    record: FileText | None = setting(
        None,
        "Folder for recordings of a camera's own video and sound, without re-encoding.",
        more="Files are FOLDER/NAME/DATE/TIME.mp4, one for every 10 minutes. `/video?segment=5m&keep=7d&max_gb=200` "
        "changes this: files of 5 minutes, at most 7 days old, at most 200 GB per stream. A path with {stream} and a "
        "time, such as /video/{stream}-%Y%m%d-%H%M%S.mp4, names the files. Video is H.264 or H.265. AAC and Opus are "
        "copied; other sound becomes AAC. A stream with a recording needs no prompts.",
        metavar="FOLDER",
    )

    @property
    def nothing(self) -> str | None:
        """The error message if the stream has nothing to detect, ask or record. None if it has."""
        return None if self.record else super().nothing

    @property
    def asked(self) -> list[tuple[str, str]]:
        """All prompts as pairs of skill and text. Labels that only rules use are included."""
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
    """The settings of one stream in a list of streams. It can have its own outputs."""

    sinks: list[FileText] = setting([], "Outputs of this stream only, besides those of all streams.")
