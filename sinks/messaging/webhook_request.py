"""Builds webhook requests: address, headers, idempotency key and signature.

The idempotency key and the signature follow the Standard Webhooks specification.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from saccade.addresses import with_plain_zone, without_zone
from saccade.sinks.base import SinkError
from saccade.sinks.urls import Address, Options

PORTS = {"http": 80, "https": 443}
EXAMPLE = "https://user:password@host/path"

_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\x00]*)")
_RESERVED = ("host", "content-length", "transfer-encoding", "connection", "idempotency-key")


@dataclass(slots=True, frozen=True)
class WebhookRequest:
    """The request settings of a webhook.

    Attributes:
        url: the address without credentials and options.
        headers: headers of every request; they may contain secrets.
        key: key of the signature; None for no signature.
    """

    url: str = field(repr=False)
    headers: dict[str, str] = field(repr=False)
    key: bytes | None = field(repr=False)

    @classmethod
    def of(cls, target: str, address: Address, options: Options) -> WebhookRequest:
        """Parse a webhook's address and its options `header`, `secret` and `secret_file`.

        Raises:
            SinkError: if the address or an option is invalid.
        """
        parts = urlsplit(with_plain_zone(target))
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()
        headers = {"Content-Type": "application/json", "User-Agent": "saccade"}
        if without_zone(url) != url:
            headers["Host"] = urlsplit(without_zone(url)).netloc
        if address.user is not None:
            login = f"{address.user}:{address.password or ''}"
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        for text in options.texts("header"):
            found = _HEADER.fullmatch(text)
            if found is None or found[1].lower() in _RESERVED or found[1].lower().startswith("webhook-"):
                name = text.partition(":")[0][:40]
                raise SinkError(f"{address.shown}: a header must be NAME:VALUE; {name!r} is not a valid header")
            headers[found[1]] = found[2]
        return cls(url, headers, _key(options, address.shown))

    def signed(self, identity: str, body: bytes, now_s: int) -> dict[str, str]:
        """Return the HTTP headers of one attempt to post a message.

        Args:
            identity: ID of the message, the same for every attempt. Receivers can ignore a repeated ID.
            body: body of the request.
            now_s: Unix time in seconds. Receivers can reject old messages to prevent replay attacks.
        """
        headers = {"Idempotency-Key": identity, "webhook-id": identity, "webhook-timestamp": str(now_s)}
        if self.key is not None:
            content = f"{identity}.{now_s}.".encode() + body
            digest = hmac.new(self.key, content, hashlib.sha256).digest()
            headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
        return headers


def _key(options: Options, shown: str) -> bytes | None:
    secret, file = options.text("secret"), options.text("secret_file")
    if file:
        try:
            secret = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not valid UTF-8; save the file as UTF-8 text"
            raise SinkError(f"{shown}: cannot read secret_file {file}: {why}") from None
        if not secret:
            raise SinkError(f"{shown}: secret_file {file} is empty")
    if secret.startswith("whsec_"):
        try:
            return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except binascii.Error:
            raise SinkError(f"{shown}: the secret after whsec_ must be base64") from None
    return secret.encode() or None
