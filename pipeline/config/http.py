"""The settings of the HTTP server of `saccade run`: its address, and who may do what."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import field_validator

from saccade.addresses import with_plain_zone
from saccade.pipeline.settings import FileText, NullIsUnset, Text, setting


class HttpSettings(NullIsUnset):
    """Where other programs may ask, and who may."""

    http: Text | None = setting(
        None,
        "Serve /healthz, /metrics and /streams there.",
        more="/metrics is for Prometheus; /streams lists, adds, removes and changes streams. Any address but 127.0.0.1 "
        "needs a token.",
        metavar="HOST:PORT",
    )
    http_token: Text | None = setting(
        None,
        "What a client of http must send, as `Authorization: Bearer …`; better in the environment.",
        metavar="TOKEN",
        env="SACCADE_TOKEN",
        repr=False,
    )
    http_token_file: FileText | None = setting(
        None, "File that holds the token, instead of http_token.", metavar="FILE"
    )
    http_access: FileText | None = setting(
        None,
        "File that says who may do what over http: viewers, operators and admins, each with a token.",
        more="Also by streams, with the headers of a proxy that authenticates people, and with an audit of every "
        "change; pipeline/server/README.md shows one. The token of http_token is an admin's then.",
        metavar="FILE",
    )
    allow_sources: list[FileText] = setting(
        [],
        "What POST /streams may open: globs of paths and addresses, and networks, such as 192.168.7.0/24.",
        more="If empty, everything where http is on 127.0.0.1, else nothing. A path counts with its symbolic links "
        "resolved; an address with every redirect, playlist, segment and key, and one whose host is private only if "
        "its network, or the host itself, is listed. Sources that listen on the network must be listed in any case.",
        metavar="ENTRY",
        flags=("--allow-source",),
    )
    http_cert: FileText | None = setting(
        None, "Certificate in PEM format for http, which is https then.", metavar="FILE"
    )
    http_key: FileText | None = setting(None, "Key of the certificate, if it is not in the same file.", metavar="FILE")

    @field_validator("http")
    @classmethod
    def _place(cls, value: str | None) -> str | None:
        if value is not None:
            parse_place(value)
        return value


def parse_place(text: str) -> tuple[str, int]:
    """Read `HOST:PORT`, `:PORT`, `PORT` or `HOST`; what is left out is 127.0.0.1 and 8080.

    Raises:
        ValueError: if it is none of these.
    """
    try:
        parts = urlsplit(f"//:{text}" if text.isdecimal() else with_plain_zone(f"//{text}"))
        port = 8080 if parts.port is None else parts.port
    except ValueError:
        parts, port = urlsplit(""), -1
    if port < 0 or parts.username is not None or parts.path or parts.query:
        raise ValueError("should be HOST:PORT, such as 127.0.0.1:8080")
    return parts.hostname or "127.0.0.1", port
