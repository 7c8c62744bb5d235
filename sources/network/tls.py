"""TLS policies for cameras, which rarely have a trusted certificate: verify, accept any, or pin one certificate."""

from __future__ import annotations

import hashlib
import re
import ssl
from dataclasses import dataclass

from saccade.sources.errors import SourceError


class WrongCertificateError(Exception):
    """Raised if the server's certificate is not the pinned one. The argument is the server's SHA-256 fingerprint."""


@dataclass(slots=True, frozen=True)
class TlsPolicy:
    """Which server certificates to accept.

    Attributes:
        verify: whether the certificate must be trusted and match the host.
        fingerprint: SHA-256 of the only accepted certificate, 64 hexadecimal digits; None to pin no certificate.
    """

    verify: bool = True
    fingerprint: str | None = None

    @classmethod
    def parse(cls, text: str) -> TlsPolicy:
        """Parse a policy: `verify`, `accept` or `sha256:HEX`.

        `accept` allows any certificate and so does not protect against interception.

        Raises:
            SourceError: if the text is none of these.
        """
        if text in ("verify", "accept"):
            return cls(verify=text == "verify")
        digits = text.lower().removeprefix("sha256:").replace(":", "")
        if not text.lower().startswith("sha256:") or not re.fullmatch("[0-9a-f]{64}", digits):
            raise SourceError("tls must be verify, accept or sha256: followed by 64 hexadecimal digits")
        return cls(verify=False, fingerprint=digits)

    def context(self) -> ssl.SSLContext:
        """Create the SSL context for the TLS handshake. A pinned certificate is compared afterwards, by `check`."""
        context = ssl.create_default_context()
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.set_ciphers("DEFAULT:@SECLEVEL=0")  # cameras have 1024-bit keys and SHA-1 signatures
        return context

    def check(self, connection: ssl.SSLSocket) -> None:
        """Compare the server's certificate with the pinned certificate, if there is one.

        Raises:
            WrongCertificateError: if they differ.
        """
        if self.fingerprint is None:
            return
        found = fingerprint_of(connection.getpeercert(binary_form=True) or b"")
        if found != self.fingerprint:
            raise WrongCertificateError(found)


def fingerprint_of(certificate: bytes) -> str:
    """Return the SHA-256 fingerprint of a certificate in DER format, as hexadecimal digits."""
    return hashlib.sha256(certificate).hexdigest()
