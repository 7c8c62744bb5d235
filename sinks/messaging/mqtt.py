"""Sink that publishes results to an MQTT broker, with topics like Frigate's."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import threading
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from saccade.distribution import install_command
from saccade.engine.results import Result
from saccade.sinks.backoff import backoff_s
from saccade.sinks.base import CHANGES, SinkError, SinkStats, SourceHints
from saccade.sinks.messaging.background_loop import BackgroundLoop
from saccade.sinks.messaging.events import HOLD_S, SILENT_S, ActiveStreams, Change, EventTracker, observations_of
from saccade.sinks.messaging.mqtt_backlog import Backlog, Item
from saccade.sinks.messaging.mqtt_topics import Topics
from saccade.sinks.messaging.rule_events import OFF, ON, discovery, frigate_message, to_text
from saccade.sinks.overlay.scene import Line, Zone
from saccade.sinks.record import Latency, make_record, to_json
from saccade.sinks.urls import Address, Options
from saccade.sources.frame import Frame

if TYPE_CHECKING:
    import aiomqtt
    from paho.mqtt.properties import Properties

log = logging.getLogger(__name__)

EXPIRY_S = 60.0  # the broker forgets the state of a stream so long after a killed process
KEEPALIVE_S = 15
PUBLISH_S = 10.0
CLOSE_S = 2.5

PORTS = {"mqtt": 1883, "mqtts": 8883}
_OVER = (b"0", b"offline", OFF.encode())  # there is nothing
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
EXAMPLE = "mqtt://user:password@host:1883/saccade"


class MqttSink:
    """Publishes to `mqtt://user:password@host:1883/saccade`, or `mqtts://` for TLS. The path is the topic prefix.

    - `saccade/available`: online or offline, retained. This topic is also the MQTT last will, so the broker sets it to
      offline if Saccade crashes. In Home Assistant, list both availability topics with `availability_mode: all`.
    - `saccade/STREAM/available`: online or offline, for one stream; offline after the stream's end, or after 30 s
      without a frame.
    - `saccade/STREAM/LABEL`: number of objects, retained, sent on change; see `EventTracker`.
    - `saccade/STREAM/zones/ZONE/LABEL`: number of objects in a zone; `saccade/STREAM/lines/LINE/LABEL/forward` and
      `…/backward`: number of line crossings since the stream began. Both are retained, sent on change, and 0 after the
      end of the stream.
    - `saccade/events`: JSON of each event that begins, changes or ends: `type` (new, update, end), `before`,
      `after`. Events of rules contain `rule`.
    - `saccade/STREAM/rules/RULE`: ON while an event of the rule is open, else OFF; retained.
    - with `discovery=homeassistant`: `homeassistant/binary_sensor/…/config` of each rule, for Home Assistant.
    - `saccade/STREAM/record`: the record of each frame, with the option `records=1`.

    With MQTT 5, the states of a stream (`online`, `ON` and counts above 0) expire after 60 s unless Saccade repeats
    them. After a crash, the broker therefore deletes them.

    An unreachable broker is retried without limit. Meanwhile, the newest 1000 events and the newest 256 records are
    queued. After reconnecting, the retained topics are updated.

    Args:
        target: the address with options: `records=1`; `hold=3`, the seconds for which an object is still counted after
            its last detection; `discovery=homeassistant`, Home Assistant's discovery prefix; `ca=FILE`, certificates to
            trust instead of the system's; `protocol=3` for a broker that supports only MQTT 3.1.1.

    Raises:
        SinkError: if the address is invalid, or aiomqtt is not installed.
    """

    shared: ClassVar[bool] = True

    def __init__(self, target: str) -> None:
        try:
            import aiomqtt  # noqa: F401 - to report at once that it is missing
        except ImportError:
            raise SinkError(f"mqtt:// needs aiomqtt: {install_command('mqtt')}") from None
        self._address = Address.parse(target, PORTS, EXAMPLE)
        options = Options(target.partition("?")[2], self._address.shown)
        self._with_records = options.flag("records")
        hold_s = options.seconds("hold", HOLD_S)
        self._discovery = options.text("discovery").strip("/")
        self._version = 5 if options.choice("protocol", ("5", "3")) == "5" else 3
        self._tls = _tls(self._address, options.text("ca"))
        options.reject_unknown()
        self._topics = Topics(self._address.path or "saccade")
        # One client id for all connections: the broker then ends the old one, with its will, before the new one begins.
        self._client_id = f"saccade-{uuid.uuid4().hex[:12]}"

        self._lock = threading.Lock()  # over everything below, which several threads write and the loop's thread reads
        self._events = EventTracker(hold_s)
        self._active = ActiveStreams()  # those that are online
        self._regions: dict[str, dict[str, int]] = {}  # counts of zones and lines, by stream and topic
        self._rules: dict[str, list[str]] = {}  # by stream
        self._events_of_rules: dict[str, Mapping[str, Any]] = {}  # those that go on, as published last, by id
        self._to_query: dict[str, None] = {}  # streams whose counts of an earlier run the broker may have
        self._backlog = Backlog(over=frozenset(over.decode() for over in _OVER))
        self._backlog.set(self._topics.available, "online")
        self._can_query = True  # used by the loop's thread only
        self._connected = False
        self._closed = False
        self._loop = BackgroundLoop(self._address.shown, self._work)

    @classmethod
    def open(cls, target: str, hints: SourceHints) -> Self:
        """Create the MQTT sink for an address such as `mqtt://host`. Raises SinkError like the constructor."""
        return cls(target)

    @property
    def dropped(self) -> int:
        """Number of events and records dropped because the MQTT broker was unreachable or slow."""
        with self._lock:
            return self._backlog.dropped

    def stats(self) -> SinkStats:
        """Return whether the MQTT broker is connected, and the number of queued messages."""
        with self._lock:
            return SinkStats(connected=self._connected, backlog=len(self._backlog), dropped=self._backlog.dropped)

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Queue the result of a frame for the MQTT broker. Thread-safe; never waits for the broker.

        Raises:
            SinkError: if the thread that publishes has failed.
        """
        self._loop.check()
        record = to_json(make_record(frame, result, latency)) if self._with_records else None
        with self._lock:
            if self._closed:
                return
            if self._active.note(frame.stream, time.monotonic()):
                self._to_query[frame.stream] = None
                self._backlog.set(self._topics.stream_available(frame.stream), "online")
            at_s = float(frame.pts * frame.time_base)
            observations = observations_of(result, frame.width, frame.height)
            self._queue_events(self._events.update(frame.stream, at_s, frame.captured_at, observations))
            if Zone.key in result.extras or Line.key in result.extras:
                self._set_regions(frame.stream, result)
            if record is not None:
                self._backlog.record(self._topics.record(frame.stream), record)
        self._loop.wake()

    def write_event(self, event: Mapping[str, Any]) -> None:
        """Queue a rule's event, or a stream's list of rules, for the MQTT broker."""
        stream = event["stream"]
        with self._lock:
            if self._closed:
                return
            if event["type"] == "rules":
                going = {one["rule"] for one in self._events_of_rules.values() if one["stream"] == stream}
                for rule in {*self._rules.get(stream, ()), *event["rules"]}:
                    self._set_rule(stream, rule, ON if rule in going else OFF)
                if event["rules"]:
                    self._rules[stream] = list(event["rules"])
                else:
                    self._rules.pop(stream, None)
            elif event["type"] in CHANGES:
                before = self._events_of_rules.get(event["id"], event)
                self._backlog.event(self._topics.events, to_text(frigate_message(before, event)).encode())
                self._events_of_rules[event["id"]] = event
                if event["type"] == "end":
                    del self._events_of_rules[event["id"]]
                self._set_rule(stream, event["rule"], OFF if event["type"] == "end" else ON)
        self._loop.wake()

    def end(self, stream: str) -> None:
        """End the events of a stream and publish the stream as offline. New frames make it online again."""
        with self._lock:
            self._end(stream)
        self._loop.wake()

    def close(self) -> None:
        """Publish the end of all streams, then disconnect within a few seconds. A second call does nothing."""
        with self._lock:
            closed, self._closed = self._closed, True
            if not closed:
                for stream in self._active.names():
                    self._end(stream)
                self._backlog.set(self._topics.available, "offline")
        self._loop.close(CLOSE_S)
        with self._lock:
            if self._backlog and not closed:
                log.warning("%s: MQTT sink closed; undelivered messages: %d", self._address.shown, len(self._backlog))

    # ---- under the lock

    def _queue_events(self, changes: list[Change]) -> None:
        for change in changes:
            now = change.after
            self._backlog.event(self._topics.events, json.dumps(change.as_json()).encode())
            self._backlog.set(self._topics.count(now.stream, now.label), str(now.count))

    def _set_regions(self, stream: str, result: Result) -> None:
        topics, known = self._topics, self._regions.get(stream, {})
        counts = dict.fromkeys(known, 0)  # also what was there, and is not
        for zone in result.extras.get(Zone.key, ()):
            if isinstance(zone, Zone):
                counts |= {topics.zone(stream, zone.name, label): one["inside"] for label, one in zone.counts.items()}
        for line in result.extras.get(Line.key, ()):
            if isinstance(line, Line):
                for label, crossings in line.counts.items():
                    counts |= {topics.line(stream, line.name, label, way): n for way, n in crossings.items()}
        self._regions[stream] = counts
        for topic, count in counts.items():
            if known.get(topic) != count:  # the backlog forgets a 0 that is published, and would send it each frame
                self._backlog.set(topic, str(count))

    def _set_rule(self, stream: str, rule: str, state: str) -> None:
        topic = self._topics.rule(stream, rule)
        self._backlog.set(topic, state)
        if self._discovery:
            available = (self._topics.available, self._topics.stream_available(stream))
            where, message = discovery(self._discovery, stream, rule, topic, available)
            self._backlog.set(where, to_text(message))

    def _end(self, stream: str) -> None:
        for topic, count in self._regions.pop(stream, {}).items():
            if count:
                self._backlog.set(topic, "0")
        if self._active.end(stream):
            self._queue_events(self._events.end(stream))
            self._backlog.set(self._topics.stream_available(stream), "offline")

    # ---- on the loop's thread

    async def _work(self, loop: BackgroundLoop) -> None:
        import aiomqtt

        failures, last_reason = 0, ""
        while not loop.stopping:
            connected_at = None
            try:
                async with self._client() as client:
                    connected_at = time.monotonic()
                    log.info("%s: connected to the MQTT broker", self._address.shown)
                    last_reason = ""
                    await self._session(client, loop)
            except aiomqtt.MqttError as error:
                failures = 1 if connected_at is not None and time.monotonic() - connected_at > 10 else failures + 1
                if "protocol version" in str(error).lower():
                    self._version = 3
                reason = "connection lost" if connected_at is not None else _ERRNO.sub("", " ".join(str(error).split()))
                if reason != last_reason:
                    log.warning("%s: MQTT broker not connected: %s; retrying", self._address.shown, reason)
                    last_reason = reason
                await loop.sleep(backoff_s(failures))

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
            protocol=aiomqtt.ProtocolVersion.V5 if self._version == 5 else aiomqtt.ProtocolVersion.V311,
            max_queued_incoming_messages=1000,
            will=aiomqtt.Will(self._topics.available, "offline", qos=1, retain=True),
        )

    async def _session(self, client: aiomqtt.Client, loop: BackgroundLoop) -> None:
        with self._lock:
            self._connected = True
            self._backlog.refresh()
            self._to_query = dict.fromkeys(self._active.names())
        # Both, since a broken connection ends the iteration over messages, and not the wait for an acknowledgement.
        tasks = {
            asyncio.create_task(self._deliver(client, loop)),
            asyncio.create_task(self._listen(client, loop)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            with self._lock:
                self._connected = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _deliver(self, client: aiomqtt.Client, loop: BackgroundLoop) -> None:
        refreshed_at = time.monotonic()
        while True:
            stopping = loop.stopping  # read first: what close() has queued is still published
            with self._lock:
                for silent in self._active.silent(time.monotonic()):
                    self._end(silent)
                if time.monotonic() - refreshed_at > EXPIRY_S / 3:
                    self._backlog.refresh()
                    refreshed_at = time.monotonic()
                to_query, self._to_query = self._to_query, {}
                item = self._backlog.next(records=not self._closed)
            for stream in to_query:
                await self._query_retained(client, self._topics.all_of(stream))
            if item is not None:
                await client.publish(item.topic, item.payload, item.qos, item.retain, self._properties(item))
                with self._lock:
                    self._backlog.published(item)
            elif stopping:
                return
            else:
                await loop.wait(min(SILENT_S / 6, EXPIRY_S / 6))

    def _properties(self, item: Item) -> Properties | None:
        """Return the expiry time of a message as MQTT 5 properties, or None if the message does not expire."""
        lasting = item.topic == self._topics.available or item.topic.endswith("/config")
        if self._version < 5 or not item.retain or lasting or item.payload in _OVER:
            return None
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.MessageExpiryInterval = max(1, round(EXPIRY_S))
        return properties

    async def _query_retained(self, client: aiomqtt.Client, topics: str) -> None:
        """Make the broker send the retained messages of `topics`, by subscribing and unsubscribing immediately."""
        import aiomqtt

        if not self._can_query:
            return
        try:
            await client.subscribe(topics, qos=1)
            await client.unsubscribe(topics)
        except aiomqtt.MqttError:
            self._can_query = False  # some brokers disconnect a client without read access, and would each time
            raise

    async def _listen(self, client: aiomqtt.Client, loop: BackgroundLoop) -> None:
        """Reset outdated retained messages of earlier runs: publish the count 0, or the rule state OFF."""
        async for message in client.messages:
            topic = message.topic.value
            over = OFF if self._topics.is_rule(topic) else "0"
            known = self._topics.is_rule(topic) or self._topics.is_count(topic)
            if message.retain and message.payload != over.encode() and known:
                with self._lock:
                    if topic not in self._backlog:
                        self._backlog.set(topic, over)
                loop.wake()


def _tls(address: Address, authorities: str) -> ssl.SSLContext | None:
    if address.scheme != "mqtts":
        if authorities:
            raise SinkError(f"{address.shown}: the option ca needs an mqtts:// address")
        return None
    try:
        return ssl.create_default_context(cafile=authorities or None)
    except OSError as error:  # ssl.SSLError is one
        raise SinkError(f"{address.shown}: cannot read certificates from {authorities}: {error.strerror}") from None
