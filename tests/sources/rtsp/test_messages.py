"""RTSP's byte stream: whatever the pieces, the same items; whatever the bytes, no other error."""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.rtsp.messages import Interleaved, MessageParser, ProtocolError, Reply, ServerRequest

REPLY = b"RTSP/1.0 200 OK\r\nCSeq: 3\r\nContent-Length: 5\r\n\r\nhello"
PACKET = b"$\x01\x00\x05\x80RTSP"
REQUEST = b"OPTIONS * RTSP/1.0\r\nCSeq: 9\r\n\r\n"


def items(data: bytes, cuts: list[int]) -> list[object]:
    parser, found = MessageParser(), []
    places = [0, *sorted(cuts), len(data)]
    for begin, end in itertools.pairwise(places):
        parser.feed(data[begin:end])
        while (item := parser.next_item()) is not None:
            found.append(item)
    return found


@given(st.lists(st.sampled_from([REPLY, PACKET, REQUEST, b"\r\n"]), max_size=12), st.data())
def test_any_pieces_give_the_same_items(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10))
    kinds = {REPLY: Reply, PACKET: Interleaved, REQUEST: ServerRequest}
    found = items(stream, cuts)
    assert [type(item) for item in found] == [kinds[part] for part in parts if part in kinds]
    assert all(item.body == "hello" for item in found if isinstance(item, Reply))
    assert all(item.data == b"\x80RTSP" for item in found if isinstance(item, Interleaved))


@given(st.binary(max_size=40).filter(lambda data: b"R" not in data and not data[:1].isalpha()))
def test_garbage_between_items_costs_few_of_them(garbage: bytes) -> None:
    packets = [b"$\x00\x01\x00\x80" + bytes([number]) * 255 for number in range(1, 200)]
    found = items(REPLY + garbage + b"".join(packets), [])
    # What looks like a packet takes at most its own 64 kB with it; anything else only itself.
    assert found[-1] == Interleaved(0, b"\x80" + bytes([199]) * 255) or b"$" in garbage
    if b"$" not in garbage:
        assert len(found) == 1 + len(packets)


@given(st.lists(st.binary(max_size=60), max_size=20))
def test_no_bytes_raise_anything_but_a_protocol_error(pieces: list[bytes]) -> None:
    parser = MessageParser()
    with suppress(ProtocolError):
        for piece in pieces:
            parser.feed(piece)
            while parser.next_item() is not None:
                pass


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"<html>",
        b"RTSP/1.0 200 OK\r\nContent-Length: 99999999\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"R" * 2_000_000,
    ],
)
def test_what_is_not_rtsp_is_refused(data: bytes) -> None:
    parser = MessageParser()
    parser.feed(data)
    with pytest.raises(ProtocolError):
        parser.next_item()
