"""Results to an HTTP server, one POST each.

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
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from saccade.engine.results import Result
from saccade.sinks.messaging.background_loop import Worker, backoff_s
from saccade.sinks.messaging.events import HOLD_S, Change, Presence, sightings_of
from saccade.sinks.messaging.outbox import Message, Outbox
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
LONGEST_WAIT_S = 300.0  # that a server may ask for

PORTS = {"http": 80, "https": 443}
EXAMPLE = "https://user:password@host/path"

_ANSWER_BYTES = 65536
_LOG_EVERY_S = 60.0
_AGAIN = (408, 425, 429)  # and all from 500: the server may take it later


class WebhookSink:
    """Posts JSON to an `http://` or `https://` address, in order, one at a time.

    A server that cannot be reached, fails or is busy is tried again until it takes the message; meanwhile up to 1000
    messages (16 MB) wait, and of more the oldest are lost, which is counted and logged. A message that the server
    refuses is lost too.

    Args:
        target: the address. A `?` in it belongs to the server, so options follow a `#`: `send=objects` (by itself),
            the record of each frame on which something was found or answered; `send=all`, of every frame;
            `send=events`, what `MqttSink` publishes as events. `timeout=10`, seconds for one POST; `hold=3`, for
            events, as for `MqttSink`.

    Raises:
        SinkError: if the address is none.
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
        options.done()

        self._lock = threading.Lock()  # over what follows, which several threads write and the worker reads
        self._presence = Presence(hold_s)
        self._streams: set[str] = set()
        self._spool = Outbox(max_records=MAX_WAITING, max_bytes=MAX_BYTES)
        self._undelivered = 0
        self._closed = False
        self._said = ""  # on the worker's thread, as the next two
        self._dropped_said = 0
        self._dropped_said_at = -_LOG_EVERY_S
        self._worker = Worker(self._address.shown, self._work)

    @property
    def dropped(self) -> int:
        """Messages that were lost: too many were waiting, or the server refused them."""
        with self._lock:
            return self._spool.dropped + self._undelivered

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Take what a frame shows; callable from several threads, and never waits for the server.

        Raises:
            SinkError: if the sink itself has failed.
        """
        self._worker.check()
        found = bool(result.detections or result.points or result.texts)
        wanted = self._send == "all" or (self._send == "objects" and found)
        record = to_json(make_record(frame, result, latency)) if wanted else None
        with self._lock:
            if self._closed:
                return
            if record is not None:
                self._spool.put(Message(frame.stream, record))
            elif self._send == "events":
                self._streams.add(frame.stream)
                at_s = float(frame.pts * frame.time_base)
                seen = sightings_of(result, frame.width, frame.height)
                self._tell(self._presence.see(frame.stream, at_s, frame.captured_at, seen))
            else:
                return
        self._worker.wake()

    def end(self, stream: str) -> None:
        """End the events of a stream of which nothing more comes."""
        with self._lock:
            self._streams.discard(stream)
            self._tell(self._presence.end(stream))
        self._worker.wake()

    def close(self) -> None:
        """Post what is waiting, for some seconds at most. A second call does nothing."""
        for stream in list(self._streams):
            self.end(stream)
        with self._lock:
            closed, self._closed = self._closed, True
        self._worker.close(CLOSE_S)
        if not closed and (lost := self.dropped + len(self._spool)):
            log.warning("%s: closed; messages lost: %d", self._address.shown, lost)

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            self._spool.put(Message(change.after.stream, json.dumps(change.as_json()).encode()))

    # ---- on the worker's thread

    async def _work(self, worker: Worker) -> None:
        import aiohttp

        headers = {"Content-Type": "application/json", "User-Agent": "saccade"}
        if self._address.user is not None:
            login = f"{self._address.user}:{self._address.password or ''}"
            headers["Authorization"] = f"Basic {b64encode(login.encode()).decode()}"
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while True:
                stopping = worker.stopping  # before looking for work: what close() left behind is still done
                with self._lock:
                    taken = self._spool.take()
                if taken is not None:
                    delivered = False
                    try:
                        delivered = await self._deliver(session, taken[0], worker)
                    finally:  # also when closing cuts it short
                        with self._lock:
                            self._undelivered += not delivered
                    self._log_losses()
                elif stopping:
                    return
                else:
                    await worker.pause(60)

    async def _deliver(self, session: aiohttp.ClientSession, message: Message, worker: Worker) -> bool:
        """Post the message until it is taken, True, or refused."""
        failures = 0
        while True:
            reason, wait_s = await self._post(session, message.text)
            if reason is None or wait_s is None:
                break
            failures += 1
            self._say(f"{reason}; trying again")
            wait_s = max(wait_s, backoff_s(failures))
            await (asyncio.sleep(wait_s) if worker.stopping else worker.rest(wait_s))
        self._say(f"{reason}; message lost" if reason else "")
        return reason is None

    async def _post(self, session: aiohttp.ClientSession, text: bytes) -> tuple[str | None, float | None]:
        """Post once: why it was not taken, None if it was; how long to wait at least until the next, None for never."""
        import aiohttp

        try:
            async with session.post(self._url, data=text, allow_redirects=False) as response:
                await response.content.read(_ANSWER_BYTES)  # so that the connection can be used again
                if response.status < 300:
                    return None, None
                reason = f"answers {response.status} {' '.join((response.reason or '').split())}"
                if response.status < 500 and response.status not in _AGAIN:
                    return reason, None
                asked = response.headers.get("Retry-After", "")
                return reason, min(float(asked), LONGEST_WAIT_S) if re.fullmatch(r"\d{1,9}", asked) else 0.0
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s", 0.0
        except aiohttp.ClientConnectorError as error:
            return error.strerror or "cannot connect", 0.0
        except aiohttp.ClientError as error:
            return type(error).__name__, 0.0  # its text may hold the address, and that a password

    def _say(self, what: str) -> None:
        """Log how it goes, where that has changed."""
        if what != self._said:
            log.warning("%s: %s", self._address.shown, what) if what else log.info("%s: works", self._address.shown)
            self._said = what

    def _log_losses(self) -> None:
        if self.dropped > self._dropped_said and time.monotonic() - self._dropped_said_at > _LOG_EVERY_S:
            log.warning("%s: messages lost so far: %d", self._address.shown, self.dropped)
            self._dropped_said, self._dropped_said_at = self.dropped, time.monotonic()
