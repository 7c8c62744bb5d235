"""SRTP decryption. The session description states the keys, as `a=crypto` (RFC 4568) or MIKEY (RFC 4567)."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from saccade.sources.errors import LiveError
from saccade.sources.rtsp.sdp import Media

_SUITES = {
    "AES_CM_128_HMAC_SHA1_80": ("SRTP_PROFILE_AES128_CM_SHA1_80", 30),
    "AES_CM_128_HMAC_SHA1_32": ("SRTP_PROFILE_AES128_CM_SHA1_32", 30),
    "AEAD_AES_128_GCM": ("SRTP_PROFILE_AEAD_AES_128_GCM", 28),
    "AEAD_AES_256_GCM": ("SRTP_PROFILE_AEAD_AES_256_GCM", 44),
}


class SrtpReceiver:
    """Decrypts the SRTP and SRTCP packets of one media stream.

    Args:
        media: SDP description of the stream, with its keys.

    Raises:
        LiveError: if the SDP has no key for a supported cipher.
    """

    def __init__(self, media: Media) -> None:
        import pylibsrtp  # only for the few cameras that encrypt; comes with aiortc

        self._error = pylibsrtp.Error
        for line in media.crypto:
            suite, _, rest = line.partition(" ")
            if suite not in _SUITES or not rest.strip().startswith("inline:"):
                continue
            name, size = _SUITES[suite]
            text = rest.strip().removeprefix("inline:").split()[0].partition("|")[0]
            try:
                key = base64.b64decode(text + "=" * (-len(text) % 4))
                profile = getattr(pylibsrtp.Policy, name)
                if len(key) != size:
                    continue
                policy = pylibsrtp.Policy(key=key, ssrc_type=pylibsrtp.Policy.SSRC_ANY_INBOUND, srtp_profile=profile)
                self._session: Any = pylibsrtp.Session(policy)
                return
            except (binascii.Error, AttributeError, pylibsrtp.Error, TypeError):
                continue  # one that this build of libsrtp does not have
        offered = ", ".join(line.partition(" ")[0] for line in media.crypto) or "no key"
        raise LiveError(
            "codec unsupported",
            f"the server encrypts ({media.profile}) with {offered}; "
            "SRTP needs a=crypto or unencrypted MIKEY with AES_CM_128_HMAC_SHA1_80",
        )

    def decrypt(self, data: bytes, *, rtcp: bool) -> bytes | None:
        """Decrypt an SRTP packet, or SRTCP if `rtcp` is True. Return None if authentication of the packet fails."""
        try:
            unprotect = self._session.unprotect_rtcp if rtcp else self._session.unprotect
            return bytes(unprotect(data))
        except (self._error, TypeError):
            return None
