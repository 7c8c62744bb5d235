"""A feed on a free port of 127.0.0.1, records to put into it, and clients of it, good and bad."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from websockets.sync.client import ClientConnection

from saccade.engine.results import Result, Text
from saccade.sinks.websocket.server import WebSocketSink
from tests.support.sinks.results import FRAME, LATENCY, RESULT

UNREAD: dict[str, Any] = {"compression": None, "max_queue": 1, "close_timeout": 0.5}
"""A client that reads from its connection only when `recv` is called."""
ASKING = (
    b"GET / HTTP/1.1\r\nHost: feed\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@contextmanager
def feed(options: str = "", **settings: Any) -> Iterator[WebSocketSink]:
    sink = WebSocketSink(f"ws://127.0.0.1:0{options}", **settings)
    try:
        yield sink
    finally:
        sink.close()


def write(sink: WebSocketSink, stream: str = "door", index: int = 0, size: int = 0) -> None:
    result = Result(RESULT.detections, RESULT.points, (Text("", "x" * size),)) if size else RESULT
    sink.write(replace(FRAME, stream=stream, index=index, captured_at=time.time()), result, LATENCY)


def hear(client: ClientConnection, timeout_s: float = 10) -> dict[str, Any]:
    message = client.recv(timeout_s)
    assert isinstance(message, str)
    heard = json.loads(message)
    assert isinstance(heard, dict)
    return heard


def ask(client: ClientConnection, **message: Any) -> dict[str, Any]:
    client.send(json.dumps(message))
    return hear(client)


def until(true: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def port_of(sink: WebSocketSink) -> int:
    return int(re.findall(r":(\d+)", sink.url)[-1])


def make_certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "feed")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths
