"""Follows the redirects of an HTTP address one by one, so that each can be checked before it is connected to.

FFmpeg would follow them by itself, to wherever they lead. Knows nothing of what is served there.
"""

from __future__ import annotations

import base64
import http.client
import ssl
from collections.abc import Callable
from urllib.parse import unquote, urljoin, urlsplit

from saccade.sources.errors import LiveError
from saccade.sources.urls import redact

CheckAddress = Callable[[str], None]
"""Called with an address before it is connected to; raises `SourceError` to refuse it."""

_MAX = 5
_TIMEOUT_S = 5.0
_REDIRECTS = (301, 302, 303, 307, 308)


def follow_redirects(url: str, check_address: CheckAddress) -> str:
    """The address that answers for `url` without a redirect.

    Args:
        url: an http or https address.
        check_address: called with `url` and with each address that it leads to.

    Raises:
        LiveError: if it cannot be reached, or redirects more than 5 times or to another protocol.
        SourceError: as `check_address`.
    """
    for _ in range(_MAX + 1):
        check_address(url)
        location = _location(url)
        if location is None:
            return url
        url = urljoin(url, location)
        if not url.lower().startswith(("http://", "https://")):
            raise LiveError("connection failed", "the server redirects to another protocol")
    raise LiveError("connection failed", f"the server redirects more than {_MAX} times")


def _location(url: str) -> str | None:
    """Where the server redirects to; None if it does not."""
    parts = urlsplit(url)
    credentials, _, place = parts.netloc.rpartition("@")
    headers = {"User-Agent": "Lavf", "Accept": "*/*"}
    if credentials:
        encoded = base64.b64encode(unquote(credentials).encode()).decode()
        headers["Authorization"] = f"Basic {encoded}"
    connection: http.client.HTTPConnection
    try:
        if parts.scheme == "https":  # certificates are not verified, as by FFmpeg: cameras sign their own
            context = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(place, timeout=_TIMEOUT_S, context=context)
        else:
            connection = http.client.HTTPConnection(place, timeout=_TIMEOUT_S)
    except (http.client.HTTPException, ValueError):
        raise LiveError("connection failed", f"{redact(url)} is not a valid address") from None
    try:
        path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()  # its body, which may have no end, is not read
        return response.getheader("Location") if response.status in _REDIRECTS else None
    except TimeoutError:
        raise LiveError("timeout", f"{redact(url)} does not answer") from None
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise LiveError("connection failed", f"{redact(url)}: {why}") from None
    finally:
        connection.close()
