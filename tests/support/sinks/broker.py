"""A real MQTT broker as a process on 127.0.0.1, and a client that listens to it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
LONG_S = 30  # far beyond what any of these needs; only so that a hang fails

needs_mosquitto = pytest.mark.skipif(
    MOSQUITTO is None and "CI" not in os.environ, reason="mosquitto is not installed: apt-get install mosquitto"
)


class Broker:
    """A broker that can be switched off, on, frozen and thawed; always on the same port. Switched off, it forgets."""

    def __init__(
        self, folder: Path, *, user: str = "", password: str = "", certificate: tuple[Path, Path] | None = None
    ) -> None:
        assert MOSQUITTO is not None, "CI needs mosquitto"
        self.port, self.tls_port = free_ports()
        self._config = folder / f"mosquitto-{self.port}.conf"
        lines = [f"listener {self.port} 127.0.0.1", "persistence false", "user root"]
        if user:
            passwords = folder / "passwords"
            maker = str(Path(MOSQUITTO).with_name("mosquitto_passwd"))
            maker = shutil.which("mosquitto_passwd") or maker
            subprocess.run([maker, "-b", "-c", str(passwords), user, password], check=True, capture_output=True)
            lines += ["allow_anonymous false", f"password_file {passwords}"]
        else:
            lines.append("allow_anonymous true")
        if certificate is not None:
            lines += [f"listener {self.tls_port} 127.0.0.1", f"certfile {certificate[0]}", f"keyfile {certificate[1]}"]
        self._config.write_text("\n".join(lines) + "\n")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.off()

    def url(self, rest: str = "") -> str:
        return f"mqtt://127.0.0.1:{self.port}{rest}"

    def on(self) -> None:
        assert MOSQUITTO is not None
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen([MOSQUITTO, "-c", str(self._config)], stdout=quiet, stderr=quiet)
        wait_for(self._answers)

    def off(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with socket.socket() as one:
            one.settimeout(1)
            return one.connect_ex(("127.0.0.1", self.port)) == 0


class Listener:
    """Subscribes to everything and keeps it, from its first connection on; connects again by itself."""

    def __init__(self, broker: Broker, *, user: str = "", password: str = "") -> None:
        self.heard: list[tuple[str, str, bool]] = []  # topic, payload, whether it had been retained
        self.subscribed = threading.Event()
        self._client = paho.Client(CallbackAPIVersion.VERSION2)
        if user:
            self._client.username_pw_set(user, password)
        self._client.reconnect_delay_set(0.05, 0.05)
        self._client.on_connect = lambda client, *_: client.subscribe("#", qos=1)
        self._client.on_subscribe = lambda *_: self.subscribed.set()
        self._client.on_disconnect = lambda *_: self.subscribed.clear()
        self._client.on_message = self._keep
        self._client.connect("127.0.0.1", broker.port)

    def __enter__(self) -> Self:
        self._client.loop_start()
        assert self.subscribed.wait(LONG_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def publish(self, topic: str, payload: str) -> None:
        self._client.publish(topic, payload, qos=1, retain=True).wait_for_publish(LONG_S)

    def of(self, topic: str) -> list[str]:
        """What was published there so far, in order."""
        return [payload for name, payload, _ in list(self.heard) if name == topic]

    def last(self, topic: str) -> str | None:
        return next(iter(reversed(self.of(topic))), None)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(payload) for payload in self.of("saccade/events")]

    def _keep(self, client: paho.Client, userdata: object, message: paho.MQTTMessage) -> None:
        self.heard.append((message.topic, message.payload.decode(), bool(message.retain)))


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def wait_for(what: Callable[[], bool], within_s: float = LONG_S) -> None:
    end = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
