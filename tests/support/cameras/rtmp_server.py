"""An RTMP server that plays an FLV file to whoever connects: handshake, three commands, and the file's tags."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CHUNK = 65536  # bytes; the client's stay at 128
_COMMAND, _VIDEO = 20, 9


@contextmanager
def rtmp_server(flv: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Yields its port, and the payloads of the commands that it got."""
    commands: list[bytes] = []
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)

    def serve() -> None:
        while not stop.is_set():
            with suppress(TimeoutError):
                call, _ = listener.accept()
                with call, suppress(OSError, EOFError):
                    _play(call, flv.read_bytes(), commands, stop)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1], commands
    finally:
        stop.set()
        thread.join()
        listener.close()


def _play(call: socket.socket, flv: bytes, commands: list[bytes], stop: threading.Event) -> None:
    call.settimeout(10)
    hello = _read(call, 1537)[1:]
    call.sendall(b"\x03" + struct.pack(">II", 0, 0) + os.urandom(1528) + hello)
    _read(call, 1536)
    _send(call, 1, struct.pack(">I", _CHUNK))
    for kind, payload in _messages(call):
        if kind != _COMMAND:
            continue
        commands.append(payload)
        length = struct.unpack(">H", payload[1:3])[0]
        name, number = payload[3 : 3 + length], payload[3 + length : 12 + length]
        if name == b"connect":
            _send(call, _COMMAND, _text("_result") + number + b"\x05" + _status("NetConnection.Connect.Success"))
        elif name == b"createStream":
            _send(call, _COMMAND, _text("_result") + number + b"\x05" + b"\x00" + struct.pack(">d", 1))
        elif name == b"play":
            _send(call, _COMMAND, _text("onStatus") + b"\x00" + bytes(8) + b"\x05" + _status("NetStream.Play.Start"))
            break
    at = 13
    while at < len(flv) and not stop.wait(0.02):
        kind, size = flv[at], int.from_bytes(flv[at + 1 : at + 4])
        stamp = int.from_bytes(flv[at + 4 : at + 7])
        _send(call, kind, flv[at + 11 : at + 11 + size], stamp)
        at += 15 + size
    while not stop.is_set():
        time.sleep(0.01)
        call.settimeout(0.05)
        with suppress(TimeoutError):
            if not call.recv(4096):
                return


def _messages(call: socket.socket) -> Iterator[tuple[int, bytes]]:
    """The messages of the client, as their types and payloads."""
    heads: dict[int, tuple[int, int]] = {}
    bodies: dict[int, bytes] = {}
    while True:
        first = _read(call, 1)[0]
        form, number = first >> 6, first & 63
        if form < 3:
            head = _read(call, (11, 7, 3)[form])
            if form < 2:
                heads[number] = int.from_bytes(head[3:6]), head[6]
        size, kind = heads[number]
        body = bodies.get(number, b"")
        body += _read(call, min(128, size - len(body)))
        if len(body) == size:
            yield kind, body
            body = b""
        bodies[number] = body


def _send(call: socket.socket, kind: int, payload: bytes, stamp: int = 0) -> None:
    stream = 1 if kind == _VIDEO else 0
    head = bytes([3]) + stamp.to_bytes(3) + len(payload).to_bytes(3) + bytes([kind]) + struct.pack("<I", stream)
    call.sendall(head + payload)


def _read(call: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := call.recv(size - len(data))):
            raise EOFError
        data += more
    return data


def _text(value: str) -> bytes:
    return b"\x02" + struct.pack(">H", len(value)) + value.encode()


def _status(code: str) -> bytes:
    pairs = [("level", "status"), ("code", code)]
    body = b"".join(struct.pack(">H", len(key)) + key.encode() + _text(value) for key, value in pairs)
    return b"\x03" + body + b"\x00\x00\x09"
