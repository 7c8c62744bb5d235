"""Reads the access token of an HTTP server from a file or an environment variable."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from pathlib import Path

ENVIRONMENT = "SACCADE_TOKEN"
_MAX_BYTES = 4096


def find_token(token: str | None, token_file: str | None, host: str) -> str | None:
    """Return the access token of a server, or None if no token is set.

    If `token` and `token_file` are None and other machines can reach the server, the environment variable
    SACCADE_TOKEN is used.

    Args:
        token: token from the settings.
        token_file: file that contains the token.
        host: address on which the server listens.

    Raises:
        ValueError: if `token` and `token_file` are both set, or the file contains no token.
    """
    if token and token_file:
        raise ValueError("both token and token_file are set: use only one of them")
    if token_file:
        return read_token(token_file)
    return token or (None if is_loopback(host) else os.environ.get(ENVIRONMENT) or None)


def read_token(path: str) -> str:
    """Read an access token from a file.

    Raises:
        ValueError: if the file cannot be read or contains no token.
    """
    try:
        with Path(path).open("rb") as file:
            token = file.read(_MAX_BYTES).decode().strip()
    except UnicodeDecodeError:
        token = ""
    except OSError as error:
        raise ValueError(f"cannot read the token in {path}: {error.strerror}") from None
    if not token or any(character.isspace() for character in token):
        raise ValueError(f"{path} must contain one token, without spaces, as UTF-8 text")
    return token


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or `localhost`, which only this machine can reach."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
