"""Posts results to an HTTP server, one request each.

Knows frames and results, but no source, model or pipeline.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from base64 import b64encode
from typing import TYPE_CHECKING, ClassVar, Self
from urllib.parse import urlsplit

from saccade.engine.results import Result
from saccade.sinks.backoff import backoff_s
from saccade.sinks.base import SinkStats, SourceHints
from saccade.sinks.messaging.background_loop import BackgroundLoop
from saccade.sinks.messaging.events import HOLD_S, Change, EventTracker, observations_of
from saccade.sinks.outbox import Message, Outbox
from saccade.sinks.record import Latency, make_record, to_json
from saccade.sinks.urls import Address, Options
from saccade.sources.frame import Frame

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

MAX_WAITING = 1000
MAX_BYTES = 16 * 1024 * 1024
TIMEOUT_S = 10.0
CLOSE_S = 5.0
LONGEST_WAIT_S = 300.0  # that a server may ask for in Retry-After

PORTS = {"http": 80, "https": 443}
EXAMPLE = "https://user:password@host/path"

_RESPONSE_BYTES = 65536
_LOG_EVERY_S = 60.0
_RETRY = (408, 425, 429)  # and all from 500


class WebhookSink:
    """Posts JSON to an `http://` or `https://` address, in order, one at a time.

    A server that cannot be reached, fails or is busy is tried again until it accepts the message; meanwhile up to 1000
    messages (16 MB) wait, beyond that the oldest are dropped, which is counted and logged. A message that the server
    refuses is lost too.

    Args:
        target: the address. A `?` in it belongs to the server, so options follow a `#`: `send=objects` (the default),
            the record of each frame on which something was found or answered; `send=all`, of every frame;
            `send=events`, what `MqttSink` publishes as events. `timeout=10`, seconds for one POST; `hold=3`, for
            events, as for `MqttSink`.

    Raises:
        SinkError: if the address is not valid.
    """

    shared: ClassVar[bool] = True

    def __init__(self, target: str) -> None:
        self._address = Address.parse(target, PORTS, EXAMPLE)
        parts = urlsplit(target)
        self._url = parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()
        options = Options(parts.fragment, self._address.shown)
        self._send = options.choice("send", ("objects", "all", "events"))
        self._timeout_s = options.seconds("timeout", TIMEOUT_S)
        hold_s = options.seconds("hold", HOLD_S)
        options.reject_unknown()

        self._lock = threading.Lock()  # over what follows, which several threads write and the loop's thread reads
        self._events = EventTracker(hold_s)
        self._streams: set[str] = set()
        self._outbox = Outbox(max_records=MAX_WAITING, max_bytes=MAX_BYTES)
        self._undelivered = 0
        self._closed = False
        self._last_message = ""  # used by the loop's thread only, as the next two
        self._dropped_logged = 0
        self._dropped_logged_at = -_LOG_EVERY_S
        self._loop = BackgroundLoop(self._address.shown, self._work)

    @classmethod
    def open(cls, target: str, hints: SourceHints) -> Self:
        """Open the sink that `target` names; raises as the constructor does."""
        return cls(target)

    @property
    def dropped(self) -> int:
        """Messages lost: too many were waiting, or the server refused them."""
        with self._lock:
            return self._outbox.dropped + self._undelivered

    def stats(self) -> SinkStats:
        """What waits for the server, and what it did not get."""
        with self._lock:
            return SinkStats(backlog=len(self._outbox), dropped=self._outbox.dropped + self._undelivered)

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Take the result of a frame; callable from several threads, and never waits for the server.

        Raises:
            SinkError: if the sink itself has failed, which is a bug.
        """
        self._loop.check()
        found = bool(result.detections or result.points or result.texts)
        send = self._send == "all" or (self._send == "objects" and found)
        record = to_json(make_record(frame, result, latency)) if send else None
        with self._lock:
            if self._closed:
                return
            if record is not None:
                self._outbox.put(Message(frame.stream, record))
            elif self._send == "events":
                self._streams.add(frame.stream)
                at_s = float(frame.pts * frame.time_base)
                observations = observations_of(result, frame.width, frame.height)
                self._put_events(self._events.update(frame.stream, at_s, frame.captured_at, observations))
            else:
                return
        self._loop.wake()

    def end(self, stream: str) -> None:
        """End the events of a stream from which nothing more comes."""
        with self._lock:
            self._streams.discard(stream)
            self._put_events(self._events.end(stream))
        self._loop.wake()

    def close(self) -> None:
        """Post the waiting messages, for 5 s at most. A second call does nothing."""
        for stream in list(self._streams):
            self.end(stream)
        with self._lock:
            closed, self._closed = self._closed, True
        self._loop.close(CLOSE_S)
        if not closed and (lost := self.dropped + len(self._outbox)):
            log.warning("%s: closed; messages lost: %d", self._address.shown, lost)

    def _put_events(self, changes: list[Change]) -> None:
        for change in changes:
            self._outbox.put(Message(change.after.stream, json.dumps(change.as_json()).encode()))

    # ---- on the loop's thread

    async def _work(self, loop: BackgroundLoop) -> None:
        import aiohttp

        headers = {"Content-Type": "application/json", "User-Agent": "saccade"}
        if self._address.user is not None:
            login = f"{self._address.user}:{self._address.password or ''}"
            headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while True:
                stopping = loop.stopping  # read first: what close() has queued is still posted
                with self._lock:
                    taken = self._outbox.take()
                if taken is not None:
                    delivered = False
                    try:
                        delivered = await self._deliver(session, taken[0], loop)
                    finally:  # also when closing cuts it short
                        with self._lock:
                            self._undelivered += not delivered
                    self._log_losses()
                elif stopping:
                    return
                else:
                    await loop.wait(60)

    async def _deliver(self, session: aiohttp.ClientSession, message: Message, loop: BackgroundLoop) -> bool:
        """Post the message until it is accepted, True, or refused, False."""
        failures = 0
        while True:
            reason, wait_s = await self._post(session, message.text)
            if reason is None or wait_s is None:
                break
            failures += 1
            self._log_status(f"{reason}; trying again")
            wait_s = max(wait_s, backoff_s(failures))
            await (asyncio.sleep(wait_s) if loop.stopping else loop.sleep(wait_s))
        self._log_status(f"{reason}; message lost" if reason else "")
        return reason is None

    async def _post(self, session: aiohttp.ClientSession, text: bytes) -> tuple[str | None, float | None]:
        """Post once; return why it was not accepted, or None, and the seconds before a retry, None for none."""
        import aiohttp

        try:
            async with session.post(self._url, data=text, allow_redirects=False) as response:
                await response.content.read(_RESPONSE_BYTES)  # so that the connection can be used again
                if response.status < 300:
                    return None, None
                reason = f"answers {response.status} {' '.join((response.reason or '').split())}"
                if response.status < 500 and response.status not in _RETRY:
                    return reason, None
                retry_after = response.headers.get("Retry-After", "")
                return reason, min(float(retry_after), LONGEST_WAIT_S) if re.fullmatch(r"\d{1,9}", retry_after) else 0.0
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s", 0.0
        except aiohttp.ClientConnectorError as error:
            return error.strerror or "cannot connect", 0.0
        except aiohttp.ClientError as error:
            return type(error).__name__, 0.0  # its text may hold the address, and that a password

    def _log_status(self, message: str) -> None:
        """Log the state, where it has changed."""
        if message != self._last_message:
            log.warning("%s: %s", self._address.shown, message) if message else log.info(
                "%s: works", self._address.shown
            )
            self._last_message = message

    def _log_losses(self) -> None:
        if self.dropped > self._dropped_logged and time.monotonic() - self._dropped_logged_at > _LOG_EVERY_S:
            log.warning("%s: messages lost so far: %d", self._address.shown, self.dropped)
            self._dropped_logged, self._dropped_logged_at = self.dropped, time.monotonic()
