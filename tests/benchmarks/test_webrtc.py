from __future__ import annotations

import pytest

from benchmarks.webrtc import time_webrtc
from saccade.sources import SourceError


@pytest.mark.parametrize("codec", ["VP8", "H264"])
def test_both_ages_are_measured(codec: str) -> None:
    result = time_webrtc(codec, seconds=1.5)
    print(f"\n{result.as_text()}")
    assert result.frames > 10
    assert 0 < result.median_ms < 5000
    assert f'"codec": "{codec}"' in result.as_json()


def test_an_unknown_codec_is_an_error() -> None:
    with pytest.raises(SourceError, match="codec must be VP8 or H264; got AV1"):
        time_webrtc("AV1", seconds=1)
