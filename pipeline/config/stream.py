"""The settings of one stream, such as its source, prompts, outputs and recording."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, field_validator

from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.analytics.stages import GATES, STAGES, check_names
from saccade.pipeline.config.prompts import Prompts, ShareSettings
from saccade.pipeline.config.queue_policy import check_policy
from saccade.pipeline.config.stream_names import check_name
from saccade.pipeline.events.settings import EventSettings
from saccade.pipeline.settings import Address, FileText, Names, Seconds, Text, setting


class StreamConfig(AnalyticsSettings, EventSettings, ShareSettings, Prompts):
    """The settings of one stream, such as its source, prompts, zones and recording."""

    name: Annotated[str, AfterValidator(check_name)] | None = setting(
        None,
        "Name of the stream in records, topics and file names; by default, it is derived from the source.",
        more="The name may contain letters, digits, '.', '_' and '-'.",
        metavar="NAME",
    )
    source: Address = setting(
        ..., "A video file, an image, a folder of images, the address of a live source or the number of a webcam."
    )
    tiles: int = setting(
        1,
        "Also process N x N overlapping tiles of the image, for small objects; slower.",
        more="Each tile costs as much as an image. With 2, the model finds many more small objects at five "
        "times the cost. Use tiles on a GPU, for photos, or if time does not matter.",
        metavar="N",
        ge=1,
        le=8,
    )
    vid_stride: int = setting(
        1,
        "Process only every Nth frame of the source.",
        more="Outputs do not contain the skipped frames.",
        metavar="N",
        ge=1,
    )
    start: Seconds | None = setting(None, "Start time in a file: seconds, or 1:30.", metavar="TIME")
    end: Seconds | None = setting(None, "End time in a file: seconds, or 1:30.", metavar="TIME")
    loop: bool = setting(
        False,
        "Play a file in a loop and in real time, like a camera.",
        more="Use it to test camera settings with a clip. Frames arrive in real time, only the newest frame is "
        "processed, and timestamps continue when the file restarts. Live sources ignore it.",
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
        more="auto uses TCP, or UDP if the camera refuses TCP or sends nothing. It returns to TCP if more than 1 "
        "% of the packets are lost. http is a tunnel through firewalls.",
        metavar="HOW",
    )
    loss: Literal["hide", "show"] = setting(
        "hide",
        "Handling of RTSP frames with missing packets: hide or show.",
        more="hide waits for the next key frame, so the model never receives a damaged frame. show also passes "
        "damaged frames to the model. Detections on such frames are unreliable.",
        metavar="HOW",
    )
    tls: Text = setting(
        "verify",
        "Check of the certificates of https, rtmps and rtsps sources: verify, accept or sha256:HEX.",
        more="The setting applies to every connection of a source, including segments and keys of HLS. "
        "Certificates of cameras rarely match their addresses. sha256:HEX accepts only the certificate "
        "with this fingerprint. The error message for a refused certificate shows the fingerprint. accept "
        "takes any certificate and does not protect against interception.",
        metavar="HOW",
    )
    queue: Annotated[str, AfterValidator(check_policy)] | None = setting(
        None,
        "Queue of frames for the model: wait, newest or keep N (default: newest for live sources, wait for files).",
        more="`wait` applies backpressure to the source and drops nothing; use it for files. `newest` queues "
        "only the newest frame, and `keep 8` queues the newest 8 frames. The next record reports the "
        "number of dropped "
        "frames.",
        metavar="POLICY",
    )
    in_flight: int = setting(
        2,
        "Maximum number of frames of a stream in the model at the same time.",
        more="With two frames, the model is busy while results are written.",
        metavar="N",
        ge=1,
        le=64,
    )
    stages: Annotated[Names, AfterValidator(partial(check_names, table=STAGES))] = setting(
        [],
        "Stages that process the results, in this order.",
        metavar="NAME",
        flags=("--stage",),
    )
    gates: Annotated[Names, AfterValidator(partial(check_names, table=GATES))] = setting(
        [],
        "Gates that select frames; the model processes a frame only if all gates admit it.",
        metavar="NAME",
        flags=("--gate",),
    )

    record_source: Address | None = setting(
        None,
        "A second stream of the same camera, with larger images, for recordings, clips and snapshots.",
        more="`source` is the camera's small stream, which is analysed. The second stream is only opened for `record` "
        "or for events with `store`, and is not decoded. If it fails, detection continues. The RTCP reports of both "
        "streams align clips and snapshots to a frame. An onvif:// address chooses the largest profile. If `source` is "
        "an onvif:// address without a profile, the default is the same address.",
        metavar="SOURCE",
    )
    record: FileText | None = setting(
        None,
        "Folder for recordings of a camera's original video and audio, without re-encoding.",
        more="Files are FOLDER/NAME/DATE/TIME.mp4, each with 10 minutes of video. "
        "`/video?segment=5m&keep=7d&max_gb=200` "
        "changes this: files of 5 minutes, at most 7 days old, at most 200 GB per stream. A path with {stream} and a "
        "time, such as /video/{stream}-%Y%m%d-%H%M%S.mp4, sets other file names. Video is H.264 or H.265. AAC "
        "and Opus are "
        "copied; other audio is converted to AAC. A stream with a recording needs no prompts.",
        metavar="FOLDER",
    )

    @property
    def nothing(self) -> str | None:
        """The error message if the stream has neither prompts nor a recording, otherwise None."""
        return None if self.record else super().nothing

    @property
    def asked(self) -> list[tuple[str, str]]:
        """All prompts as pairs of task and text, such as ("detect", "person"). Labels of rules are included."""
        asked = super().asked
        named = {text for skill, text in asked if skill in ("detect", "point")}
        return [*asked, *(("detect", label) for label in self.rule_labels if label not in named)]

    @field_validator("end")
    @classmethod
    def _after_start(cls, value: float | None, info: Any) -> float | None:
        start = info.data.get("start")
        if value is not None and start is not None and value <= start:
            raise ValueError(f"the end time should be later than the start time, which is {start:g} s")
        return value


class ListedStream(StreamConfig):
    """The settings of one stream in the list `streams` of a configuration. `sinks` are outputs of this stream only."""

    sinks: list[FileText] = setting(
        [], "Outputs that only this stream uses, in addition to the outputs of all streams."
    )
