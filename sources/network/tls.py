"""TLS to cameras, whose certificates hardly ever match their address: verify, accept, or pin one. Knows no sockets."""

from __future__ import annotations

import hashlib
import re
import ssl
from dataclasses import dataclass

from saccade.sources.errors import SourceError


class WrongCertificateError(Exception):
    """The server's certificate is not the pinned one; the argument is its fingerprint."""


@dataclass(slots=True, frozen=True)
class TlsPolicy:
    """Which certificates are accepted.

    Attributes:
        verify: whether the certificate must be trusted and match the host.
        fingerprint: SHA-256 of the one certificate accepted, 64 hexadecimal digits; None for any.
    """

    verify: bool = True
    fingerprint: str | None = None

    @classmethod
    def parse(cls, text: str) -> TlsPolicy:
        """Read `verify`, `accept` (any certificate: no protection against interception) or `sha256:HEX`.

        Raises:
            SourceError: if it is none of these.
        """
        if text in ("verify", "accept"):
            return cls(verify=text == "verify")
        digits = text.lower().removeprefix("sha256:").replace(":", "")
        if not text.lower().startswith("sha256:") or not re.fullmatch("[0-9a-f]{64}", digits):
            raise SourceError("tls must be verify, accept or sha256: and the 64 hexadecimal digits of a certificate")
        return cls(verify=False, fingerprint=digits)

    def context(self) -> ssl.SSLContext:
        """A context for the handshake; call `check` after it."""
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.set_ciphers("DEFAULT:@SECLEVEL=0")  # cameras have 1024-bit keys and SHA-1 signatures
        return context

    def check(self, connection: ssl.SSLSocket) -> None:
        """Compare the certificate with the pinned one.

        Raises:
            WrongCertificateError: if it is another.
        """
        if self.fingerprint is None:
            return
        found = fingerprint_of(connection.getpeercert(binary_form=True) or b"")
        if found != self.fingerprint:
            raise WrongCertificateError(found)


def fingerprint_of(certificate: bytes) -> str:
    """SHA-256 of a certificate in DER, as hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()
