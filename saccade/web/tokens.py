"""Tokens from where others cannot read them: a file or the environment, besides an address or a flag."""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from pathlib import Path

ENVIRONMENT = "SACCADE_TOKEN"
_MAX_BYTES = 4096


def find_token(token: str | None, token_file: str | None, host: str) -> str | None:
    """The token for a server on `host`: as given, the content of a file, or SACCADE_TOKEN where one is needed.

    Args:
        token: as the user gave it.
        token_file: file that holds it, white space around it left out.
        host: where the server listens; a token is needed unless only this machine can reach it.

    Raises:
        ValueError: if both are given, or the file holds no token, in half a line for the user.
    """
    if token and token_file:
        raise ValueError("there are a token and a token_file: give one or the other")
    if token_file:
        return read_token(token_file)
    return token or (None if is_loopback(host) else os.environ.get(ENVIRONMENT) or None)


def read_token(path: str) -> str:
    """The token in a file.

    Raises:
        ValueError: if it cannot be read, or holds none.
    """
    try:
        with Path(path).open("rb") as file:
            token = file.read(_MAX_BYTES).decode().strip()
    except UnicodeDecodeError:
        token = ""
    except OSError as error:
        raise ValueError(f"cannot read the token in {path}: {error.strerror}") from None
    if not token or any(character.isspace() for character in token):
        raise ValueError(f"{path} should hold a token and nothing else")
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on `host`."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
