"""Results to an MQTT broker, in the topics that Frigate made common.

Knows frames and results, but no source, model or pipeline.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import threading
import time
import uuid
from typing import TYPE_CHECKING, ClassVar

from saccade.engine.results import Result
from saccade.sinks.base import SinkError
from saccade.sinks.messaging.background_loop import Worker, backoff_s
from saccade.sinks.messaging.events import HOLD_S, Change, Presence, sightings_of
from saccade.sinks.messaging.mqtt_backlog import Backlog
from saccade.sinks.messaging.mqtt_topics import Topics
from saccade.sinks.record import Latency, make_record, to_json
from saccade.sinks.urls import Address, Options
from saccade.sources.frame import Frame

if TYPE_CHECKING:
    import aiomqtt

log = logging.getLogger(__name__)

SILENT_S = 30.0  # a stream without a record for so long is offline
KEEPALIVE_S = 15
PUBLISH_S = 10.0
CLOSE_S = 3.0

PORTS = {"mqtt": 1883, "mqtts": 8883}
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
EXAMPLE = "mqtt://user:password@host:1883/saccade"


class MqttSink:
    """Publishes to `mqtt://user:password@host:1883/saccade`, or `mqtts://` for TLS; `saccade` begins every topic.

    - `saccade/available`: online or offline, retained; offline is the last will, so also after a crash.
    - `saccade/STREAM/available`: the same for one stream; offline when it has ended or been silent for 30 s.
    - `saccade/STREAM/LABEL`: how many there are, retained, on change. See `Presence` for what counts.
    - `saccade/events`: JSON of each event that begins, changes or ends: `type` (new, update, end), `before`, `after`.
    - `saccade/STREAM/record`: the record of each frame, with the option `records=1`.

    A broker that is not there is tried again for ever. What is retained is brought up to date then; events wait for it,
    the newest 1000 of them; of the records, the newest 256.

    Args:
        target: the address, with options behind it: `records=1`; `hold=3`, the seconds to go on counting what is not
            seen any more; `ca=FILE`, certificates to trust instead of the system's.

    Raises:
        SinkError: if the address is none, or aiomqtt is not installed.
    """

    shared: ClassVar[bool] = True

    def __init__(self, target: str) -> None:
        try:
            import aiomqtt  # noqa: F401 - here for those who lack it, and not to be loaded by those who do not need it
        except ImportError:
            raise SinkError("mqtt:// needs aiomqtt: pip install 'saccade[mqtt]'") from None
        self._address = Address.parse(target, PORTS, EXAMPLE)
        options = Options(target.partition("?")[2], self._address.shown)
        self._with_records = options.flag("records")
        hold_s = options.seconds("hold", HOLD_S)
        self._tls = _tls(self._address, options.text("ca"))
        options.done()
        self._topics = Topics(self._address.path or "saccade")
        # One name for all connections: the broker then ends the old one, will and all, before the new one begins.
        self._client_id = f"saccade-{uuid.uuid4().hex[:12]}"

        self._lock = threading.Lock()  # over everything below, which several threads write and the worker reads
        self._presence = Presence(hold_s)
        self._heard: dict[str, float] = {}  # the streams that are online, and when each last had a record
        self._unasked: dict[str, None] = {}  # streams of which the broker may have counts of an earlier run
        self._backlog = Backlog(over=frozenset({"0", "offline"}))
        self._backlog.set(self._topics.available, "online")
        self._may_ask = True  # on the worker's thread only
        self._closed = False
        self._worker = Worker(self._address.shown, self._work)

    @property
    def dropped(self) -> int:
        """Events and records that were lost because the broker was away or slow."""
        with self._lock:
            return self._backlog.dropped

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Take what a frame shows; callable from several threads, and never waits for the broker.

        Raises:
            SinkError: if the sink itself has failed.
        """
        self._worker.check()
        record = to_json(make_record(frame, result, latency)) if self._with_records else None
        with self._lock:
            if self._closed:
                return
            if frame.stream not in self._heard:
                self._unasked[frame.stream] = None
                self._backlog.set(self._topics.stream_available(frame.stream), "online")
            self._heard[frame.stream] = time.monotonic()
            at_s = float(frame.pts * frame.time_base)
            seen = sightings_of(result, frame.width, frame.height)
            self._tell(self._presence.see(frame.stream, at_s, frame.captured_at, seen))
            if record is not None:
                self._backlog.record(self._topics.record(frame.stream), record)
        self._worker.wake()

    def end(self, stream: str) -> None:
        """End the events of a stream and say that it is offline, until it is written again."""
        with self._lock:
            self._end(stream)
        self._worker.wake()

    def close(self) -> None:
        """End all streams, say goodbye and disconnect, within some seconds. A second call does nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
            if not closed:
                for stream in list(self._heard):
                    self._end(stream)
                self._backlog.set(self._topics.available, "offline")
        self._worker.close(CLOSE_S)
        with self._lock:
            if self._backlog and not closed:
                log.warning("%s: closed; messages undelivered: %d", self._address.shown, len(self._backlog))

    # ---- under the lock

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            now = change.after
            self._backlog.event(self._topics.events, json.dumps(change.as_json()).encode())
            self._backlog.set(self._topics.count(now.stream, now.label), str(now.count))

    def _end(self, stream: str) -> None:
        if self._heard.pop(stream, None) is not None:
            self._tell(self._presence.end(stream))
            self._backlog.set(self._topics.stream_available(stream), "offline")

    def _end_silent(self) -> None:
        """End the streams that have been silent for too long."""
        for stream, heard in list(self._heard.items()):
            if time.monotonic() - heard > SILENT_S:
                self._end(stream)

    # ---- on the worker's thread

    async def _work(self, worker: Worker) -> None:
        import aiomqtt

        failures, told = 0, ""
        while not worker.stopping:
            connected_at = None
            try:
                async with self._client() as client:
                    connected_at = time.monotonic()
                    log.info("%s: connected", self._address.shown)
                    told = ""
                    await self._session(client, worker)
            except aiomqtt.MqttError as error:
                failures = 1 if connected_at is not None and time.monotonic() - connected_at > 10 else failures + 1
                reason = "connection lost" if connected_at is not None else _ERRNO.sub("", " ".join(str(error).split()))
                if reason != told:
                    log.warning("%s: %s; trying again", self._address.shown, reason)
                    told = reason
                await worker.rest(backoff_s(failures))

    def _client(self) -> aiomqtt.Client:
        import aiomqtt

        return aiomqtt.Client(
            self._address.host,
            self._address.port,
            identifier=self._client_id,
            username=self._address.user,
            password=self._address.password,
            tls_context=self._tls,
            keepalive=KEEPALIVE_S,
            timeout=PUBLISH_S,
            max_queued_incoming_messages=1000,
            will=aiomqtt.Will(self._topics.available, "offline", qos=1, retain=True),
        )

    async def _session(self, client: aiomqtt.Client, worker: Worker) -> None:
        with self._lock:
            self._backlog.connected()
            self._unasked = dict.fromkeys(self._heard)
        # Both, since a connection that breaks is told to whoever listens, and not to whoever waits for an answer.
        tasks = {
            asyncio.create_task(self._deliver(client, worker)),
            asyncio.create_task(self._listen(client, worker)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, client: aiomqtt.Client, worker: Worker) -> None:
        while True:
            stopping = worker.stopping  # before looking for work: what close() left behind is still done
            with self._lock:
                self._end_silent()
                unasked, self._unasked = self._unasked, {}
                item = self._backlog.next(records=not self._closed)
            for stream in unasked:
                await self._ask(client, self._topics.all_of(stream))
            if item is not None:
                await client.publish(item.topic, item.payload, item.qos, item.retain)
                with self._lock:
                    self._backlog.published(item)
            elif stopping:
                return
            else:
                await worker.pause(SILENT_S / 6)

    async def _ask(self, client: aiomqtt.Client, topics: str) -> None:
        """Have what is retained sent to `_listen`. Unsubscribed at once: it has been sent by then."""
        import aiomqtt

        if not self._may_ask:
            return
        try:
            await client.subscribe(topics, qos=1)
            await client.unsubscribe(topics)
        except aiomqtt.MqttError:
            self._may_ask = False  # some brokers throw out those who may not read, and would each time
            raise

    async def _listen(self, client: aiomqtt.Client, worker: Worker) -> None:
        """Set to 0 the counts that an earlier run left behind; fail as soon as the connection does."""
        async for message in client.messages:
            topic = message.topic.value
            if message.retain and message.payload != b"0" and self._topics.is_count(topic):
                with self._lock:
                    if topic not in self._backlog:
                        self._backlog.set(topic, "0")
                worker.wake()


def _tls(address: Address, authorities: str) -> ssl.SSLContext | None:
    if address.scheme != "mqtts":
        if authorities:
            raise SinkError(f"{address.shown}: ca is for mqtts://")
        return None
    try:
        return ssl.create_default_context(cafile=authorities or None)
    except OSError as error:  # ssl.SSLError is one
        raise SinkError(f"{address.shown}: cannot read certificates from {authorities}: {error.strerror}") from None
