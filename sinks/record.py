"""The JSON record of one frame, as sent to files, WebSocket, MQTT and webhooks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from saccade.engine.results import Box, Result, Spot, Text
from saccade.sources.frame import Frame

SCHEMA = "saccade/2"

# Coordinates are bins of 1/1024: five decimals keep them apart, and are 0.04 pixels of an image 3840 pixels wide.
_NORM_DIGITS = 5
_PIXEL_DIGITS = 1
_SCORE_DIGITS = 3
_PROBABILITY_DIGITS = 4
_MS_DIGITS = 2
_SPEED_DIGITS = 4


@dataclass(slots=True, frozen=True)
class Latency:
    """Latency of one frame in milliseconds, per stage of the pipeline.

    Attributes:
        decode: demuxing, decoding and converting the frame.
        queue: waiting between the stages.
        prefill: the model's prefill of image and prompts.
        decode_tokens: the model's generation of the answer tokens.
        track: tracking and zones.
        total: from the start of decoding to the result, including waiting.
    """

    decode: float = 0.0
    queue: float = 0.0
    prefill: float = 0.0
    decode_tokens: float = 0.0
    track: float = 0.0
    total: float = 0.0


def drawn_latency(frame: Frame, latency: Latency) -> float:
    """Return the latency to show on a frame, in milliseconds. For a file, waiting time in queues does not count."""
    return latency.total - latency.queue if frame.capture_clock == "file" else latency.total


def make_record(frame: Frame, result: Result, latency: Latency) -> dict[str, Any]:
    """Build the record of one frame as JSON values.

    Each box is listed as `box` in pixels and as `box_norm` in normalized coordinates (0 to 1). Both are rounded lists
    `[x1, y1, x2, y2]`.
    """
    width, height = frame.width, frame.height
    return {
        "schema": SCHEMA,
        "stream": frame.stream,
        "frame": frame.index,
        "pts": frame.pts,
        "time_base": f"{frame.time_base.numerator}/{frame.time_base.denominator}",
        "captured_at": round(frame.captured_at, 3),
        "capture_clock": frame.capture_clock,
        "width": width,
        "height": height,
        "latency_ms": {name: round(ms, _MS_DIGITS) for name, ms in asdict(latency).items()},
        "dropped_since_last": frame.dropped_before,
        "objects": [
            {
                "label": box.label,
                "score": round(box.score, _SCORE_DIGITS),
                "box": [round(v, _PIXEL_DIGITS) for v in box.pixels(width, height)],
                "box_norm": [round(v, _NORM_DIGITS) for v in (box.x1, box.y1, box.x2, box.y2)],
                **_over_time(box),
            }
            for box in result.detections.boxes
        ],
        "points": [
            {
                "label": spot.label,
                "score": round(spot.score, _SCORE_DIGITS),
                "x": round(spot.x * width, _PIXEL_DIGITS),
                "y": round(spot.y * height, _PIXEL_DIGITS),
                "x_norm": round(spot.x, _NORM_DIGITS),
                "y_norm": round(spot.y, _NORM_DIGITS),
                **_over_time(spot),
            }
            for spot in result.points.points
        ],
        "answers": [_answer(text) for text in result.texts],
        **_extras(result, width, height),
    }


def _answer(text: Text) -> dict[str, Any]:
    """Return the model's answer to a question as JSON values, with probabilities and reasoning if available."""
    answer: dict[str, Any] = {"prompt": text.prompt, "text": text.text}
    if text.probabilities is not None:
        answer["probabilities"] = {choice: round(p, _PROBABILITY_DIGITS) for choice, p in text.probabilities.items()}
    if text.reasoning is not None:
        grounding = [
            {"start": one.start, "end": one.end, "points": [[round(v, _NORM_DIGITS) for v in xy] for xy in one.points]}
            for one in text.reasoning.grounding
        ]
        answer["reasoning"] = {"text": text.reasoning.text, "grounding": grounding}
    return answer


def _over_time(found: Box | Spot) -> dict[str, Any]:
    """Return the track ID, speed and zones of an object as JSON values, without those that are unknown."""
    known: dict[str, Any] = {}
    if found.track_id is not None:
        known = {"track_id": found.track_id, "track": found.track_id}  # the latter as in saccade/1
    if found.speed is not None:
        known["speed"] = round(found.speed, _SPEED_DIGITS)
    if found.zones:
        known["zones"] = list(found.zones)
    if found.predicted:
        known["predicted"] = True
    return known


def _extras(result: Result, width: int, height: int) -> dict[str, Any]:
    """Return the JSON values of `result.extras`, such as the counts of zones."""
    recorded = {key: [dict(part.to_record(width, height)) for part in parts] for key, parts in result.extras.items()}
    return {key: full for key, values in recorded.items() if (full := [value for value in values if value])}


def to_json(record: Mapping[str, Any]) -> bytes:
    """Encode a record as one line of compact JSON in UTF-8.

    Raises:
        ValueError: if a number is not finite.
    """
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")
