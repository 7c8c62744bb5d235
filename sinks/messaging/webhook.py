"""Webhook sink: posts results to an HTTP server, one request per message."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import re
import ssl
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from saccade.engine.results import Result
from saccade.sinks.backoff import backoff_s
from saccade.sinks.base import CHANGES, SinkStats, SourceHints
from saccade.sinks.messaging.background_loop import BackgroundLoop
from saccade.sinks.messaging.events import HOLD_S, ActiveStreams, Change, EventTracker, observations_of
from saccade.sinks.messaging.webhook_request import EXAMPLE, PORTS, WebhookRequest
from saccade.sinks.outbox import Message, Outbox
from saccade.sinks.record import Latency, make_record, to_json
from saccade.sinks.urls import Address, Options
from saccade.sources.frame import Frame

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

MAX_WAITING = 1000
MAX_BYTES = 16 * 1024 * 1024
RECORD_AGE_S = 10.0  # a record is about now; at 0.3 s a request and 10 records a second, it would soon be half a minute
EVENT_AGE_S = 3600.0
TIMEOUT_S = 10.0
CLOSE_S = 3.0  # with the loop's own second, within the 5 s that a process has to end
LONGEST_WAIT_S = 300.0  # that a server may ask for in Retry-After

_RESPONSE_BYTES = 65536
_LOG_EVERY_S = 60.0
_WAIT_S = 1.0
_RETRY = (408, 425, 429)  # and all from 500


class WebhookSink:
    """Webhook sink that posts JSON to an `http://` or `https://` address.

    A message is retried if the server is unreachable or busy, or returns a 5xx error. A message is dropped if it is too
    old, if the queue is full (1000 messages or 16 MB), or if the server rejects it. Drops are counted in the metrics.

    Each request has the headers of the Standard Webhooks specification: `webhook-id`, `webhook-timestamp` and, with a
    secret, `webhook-signature`. All attempts to post a message have the same `webhook-id` and `Idempotency-Key`.

    Args:
        target: the address. Options follow a `#`, because a `?` belongs to the address:

            - `send=objects` (default): records of frames with a detection or an answer. `send=all`: all records.
              `send=events`: the events of `MqttSink` and of rules. `send=rules`: events of rules only.
            - `snapshot=1`: also post the snapshots of events, as base64-encoded JPEG.
            - `max_age=10s`: maximum age of a message. Default: 10 s for records, 1 hour for events.
            - `keep=newest`: queue only the newest record of each stream.
            - `concurrency=1`: number of parallel requests. With more than 1, messages can arrive out of order.
            - `secret=…` or `secret_file=PATH`: key of the signature.
            - `header=NAME:VALUE`: additional header; repeatable.
            - `timeout=10`: timeout of a request in seconds.
            - `hold=3`: see `MqttSink`.

    Raises:
        SinkError: if the address or an option is invalid.
    """

    shared: ClassVar[bool] = True

    def __init__(self, target: str) -> None:
        self._address = Address.parse(target, PORTS, EXAMPLE)
        options = Options(target.partition("#")[2], self._address.shown)
        self._send = options.choice("send", ("objects", "all", "events", "rules"))
        self._snapshots = options.flag("snapshot")
        self._max_age_s = options.seconds("max_age", EVENT_AGE_S if self._send in ("events", "rules") else RECORD_AGE_S)
        newest = options.choice("keep", ("all", "newest")) == "newest"
        self._concurrency = options.count("concurrency", 1, 64)
        self._timeout_s = options.seconds("timeout", TIMEOUT_S)
        hold_s = options.seconds("hold", HOLD_S)
        self._request = WebhookRequest.of(target, self._address, options)
        options.reject_unknown()

        self._lock = threading.Lock()  # over what follows, which several threads write and the loop's thread reads
        self._events = EventTracker(hold_s)
        self._active = ActiveStreams()
        self._outbox = Outbox(
            newest=newest and self._send not in ("events", "rules"), max_records=MAX_WAITING, max_bytes=MAX_BYTES
        )
        self._under_way: dict[str, Message] = {}  # by id
        self._sent = 0
        self._undelivered = 0
        self._closed = False
        self._last_message = ""  # used by the loop's thread only, as the next two
        self._dropped_logged = 0
        self._dropped_logged_at = -_LOG_EVERY_S
        self._loop = BackgroundLoop(self._address.shown, self._work)

    @classmethod
    def open(cls, target: str, hints: SourceHints) -> Self:
        """Create the webhook sink for an HTTP address with options. Raises SinkError like the constructor."""
        return cls(target)

    @property
    def dropped(self) -> int:
        """Number of webhook messages that were not delivered, for example because the queue was full."""
        with self._lock:
            return self._outbox.dropped + self._undelivered

    def stats(self) -> SinkStats:
        """Return the numbers of queued, sent and dropped webhook messages."""
        with self._lock:
            begun = [message.queued_at for message in self._under_way.values()]
            oldest = min([*begun, *([] if self._outbox.oldest_at is None else [self._outbox.oldest_at])], default=None)
            return SinkStats(
                backlog=len(self._outbox) + len(begun),
                backlog_age_s=0.0 if oldest is None else time.monotonic() - oldest,
                sent=self._sent,
                dropped=self._outbox.dropped + self._undelivered,
            )

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Queue the result of a frame for posting. Thread-safe; never waits for the server.

        Raises:
            SinkError: if the thread that posts messages has failed.
        """
        self._loop.check()
        found = bool(result.detections or result.points or result.texts)
        send = self._send == "all" or (self._send == "objects" and found)
        record = to_json(make_record(frame, result, latency)) if send else None
        with self._lock:
            if self._closed:
                return
            if record is not None:
                self._outbox.put(Message(frame.stream, record, queued_at=time.monotonic()))
            elif self._send == "events":
                self._active.note(frame.stream, time.monotonic())
                at_s = float(frame.pts * frame.time_base)
                observations = observations_of(result, frame.width, frame.height)
                self._put_events(self._events.update(frame.stream, at_s, frame.captured_at, observations))
            else:
                return
        self._loop.wake()

    def write_event(self, event: Mapping[str, Any]) -> None:
        """Queue an event of a rule, or the snapshot of an event, if the webhook is configured to post it."""
        if self._send not in ("events", "rules"):
            return
        if event["type"] in CHANGES:
            text = to_json(event)
        elif self._snapshots and event["type"] == "media" and event["kind"] == "snapshot" and event["path"]:
            try:
                image = base64.b64encode(Path(event["path"]).read_bytes()).decode()
            except OSError:
                return  # its event was deleted meanwhile
            shown = {"type": "snapshot", "id": event["event"], "stream": event["stream"], "snapshot_jpeg": image}
            text = to_json(shown)
        else:
            return
        with self._lock:
            if not self._closed:
                self._outbox.put(Message(event["stream"], text, queued_at=time.monotonic()))
        self._loop.wake()

    def end(self, stream: str) -> None:
        """End all open events of a stream that has ended, and queue their `end` messages."""
        with self._lock:
            self._end(stream)
        self._loop.wake()

    def close(self) -> None:
        """Post the queued messages for at most 3 s, then stop. A second call does nothing."""
        with self._lock:
            for stream in self._active.names():
                self._end(stream)
            closed, self._closed = self._closed, True
        self._loop.close(CLOSE_S)
        if not closed and (lost := self.dropped + len(self._outbox)):
            log.warning("%s: webhook closed; undelivered messages: %d", self._address.shown, lost)

    def _end(self, stream: str) -> None:
        self._active.end(stream)
        self._put_events(self._events.end(stream))

    def _put_events(self, changes: list[Change]) -> None:
        for change in changes:
            text = json.dumps(change.as_json()).encode()
            self._outbox.put(Message(change.after.stream, text, queued_at=time.monotonic()))

    # ---- on the loop's thread

    async def _work(self, loop: BackgroundLoop) -> None:
        import httpx

        tasks: set[asyncio.Task[None]] = set()

        def done(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            loop.wake()

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            timeout=None,
            headers=[(name.encode(), value.encode()) for name, value in self._request.headers.items()],
            trust_env=False,
            limits=limits,
        ) as session:
            try:
                while True:
                    stopping = loop.stopping  # read first: what close() has queued is still posted
                    identity, message = self._next(len(tasks))
                    self._log_losses()
                    if message is not None:
                        task = asyncio.create_task(self._deliver(session, identity, message, loop))
                        tasks.add(task)
                        task.add_done_callback(done)
                    elif stopping and not tasks:
                        return
                    else:
                        await loop.wait(_WAIT_S)
            finally:  # also when closing cancels it
                for task in list(tasks):
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                with self._lock:  # a task that is cancelled before it begins has not counted its message
                    self._undelivered += len(self._under_way)
                    self._under_way.clear()

    def _next(self, running: int) -> tuple[str, Message | None]:
        """Return a unique ID and the next message to post. The message is None if none can be posted now."""
        now = time.monotonic()
        with self._lock:
            for stream in self._active.silent(now):
                self._end(stream)
            self._outbox.drop_before(now - self._max_age_s)
            taken = self._outbox.take() if running < self._concurrency else None
            identity = uuid.uuid4().hex
            if taken is None:
                return identity, None
            self._under_way[identity] = taken[0]
            return identity, taken[0]

    async def _deliver(self, session: httpx.AsyncClient, identity: str, message: Message, loop: BackgroundLoop) -> None:
        """Post a message. Retry until the server accepts or rejects the message, or the message is too old."""
        failures = 0
        accepted = False
        try:
            while True:
                reason, wait_s = await self._post(session, identity, message.text)
                accepted = reason is None
                if reason is None or wait_s is None:
                    break
                failures += 1
                wait_s = max(wait_s, backoff_s(failures))
                if time.monotonic() + wait_s - message.queued_at > self._max_age_s:
                    reason += f" for {self._max_age_s:g} s"
                    break
                self._log_status(f"{reason}; retrying")
                await (asyncio.sleep(wait_s) if loop.stopping else loop.sleep(wait_s))
            self._log_status(f"{reason}; message lost" if reason else "")
        finally:  # also when closing cancels it
            with self._lock:
                del self._under_way[identity]
                self._sent += accepted
                self._undelivered += not accepted

    async def _post(self, session: httpx.AsyncClient, identity: str, text: bytes) -> tuple[str | None, float | None]:
        """Post a message once. Return the reason for a failure and the minimum retry delay in seconds.

        The reason is None after success. The delay is None if the message must not be retried.
        """
        import httpx

        headers = self._request.signed(identity, text, int(time.time()))
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                session.stream("POST", self._request.url, content=text, headers=headers) as response,
            ):
                received = 0
                async for part in response.aiter_raw():  # so that the connection can be used again
                    received += len(part)
                    if received > _RESPONSE_BYTES:
                        break
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s", 0.0
        except httpx.ConnectError as error:
            return _why(error), 0.0
        except httpx.HTTPError as error:
            return type(error).__name__, 0.0  # its text may hold the address, and that a password
        if response.status_code < 300:
            return None, None
        reason = f"answers {response.status_code} {' '.join(response.reason_phrase.split())}"
        if response.status_code < 500 and response.status_code not in _RETRY:
            return reason, None
        retry_after = response.headers.get("Retry-After", "")
        return reason, min(float(retry_after), LONGEST_WAIT_S) if re.fullmatch(r"\d{1,9}", retry_after) else 0.0

    def _log_status(self, message: str) -> None:
        """Log the webhook's status if it has changed: the failure `message`, or success if `message` is empty."""
        if message != self._last_message:
            log.log(logging.WARNING if message else logging.INFO, "%s: %s", self._address.shown, message or "works")
            self._last_message = message

    def _log_losses(self) -> None:
        if self.dropped > self._dropped_logged and time.monotonic() - self._dropped_logged_at > _LOG_EVERY_S:
            log.warning("%s: webhook messages dropped so far: %d", self._address.shown, self.dropped)
            self._dropped_logged, self._dropped_logged_at = self.dropped, time.monotonic()


def _why(error: BaseException) -> str:
    """Return the reason for a connection error, without the address of the server, which can contain secrets."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if isinstance(found, ssl.SSLCertVerificationError):
            return f"certificate refused: {found.verify_message}"
        if isinstance(found, OSError) and (found.errno or found.strerror):
            known = os.strerror(found.errno) if found.errno and found.errno > 0 else found.strerror
            return known or "cannot connect"
        found = found.__cause__ or found.__context__
    return "cannot connect"
