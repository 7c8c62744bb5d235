"""Signals of an ONVIF camera, such as detected motion and digital inputs. A PullPoint subscription delivers them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from saccade.sources.errors import LiveError, SourceError

log = logging.getLogger(__name__)

_PULL_S = 5  # longest wait of the camera for the next message
_SUBSCRIBED_S = 60  # duration of a subscription; the library renews it
_HOLD_S = 1.0  # a shorter signal would fall between two frames
_RETRY_S = (2.0, 60.0)
_KINDS = {
    "MotionAlarm": "motion",
    "CellMotionDetector/Motion": "motion",
    "MotionRegionDetector/Motion": "motion",
    "Trigger/DigitalInput": "input",
}
"""Name of the signal for each ONVIF event topic, by the end of the topic."""
_STATES = ("State", "IsMotion", "LogicalState")


class CameraSignals:
    """Receives the signals of an ONVIF camera, such as motion, in a thread. The first call of `read` starts the thread.

    Args:
        name: name of the stream, for the log.
        closed: event; setting it ends the thread.
        ask: connects to the camera and runs the given coroutine function, such as `ask_device`.
    """

    def __init__(self, name: str, closed: threading.Event, ask: Callable[[Callable[[Any], Any]], object]) -> None:
        self._name = name
        self._closed = closed
        self._ask = ask
        self._lock = threading.Lock()  # guards the attributes below
        self._thread: threading.Thread | None = None
        self._known = False
        self._on: set[tuple[str, str]] = set()  # signal and token of its source
        self._off_at: dict[tuple[str, str], float] = {}

    def read(self) -> frozenset[str] | None:
        """Return the active signals, or None if the camera's events cannot be received. Thread-safe.

        Each signal is contained twice: by name, such as `input`, and with its source, such as `input DigitInput_1`. A
        signal stays active for one second after its end.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="saccade onvif events", daemon=True)
                self._thread.start()
            if not self._known:
                return None
            since = time.monotonic() - _HOLD_S
            active = self._on | {one for one, at in self._off_at.items() if at > since}
        return frozenset(name for kind, token in active for name in (kind, f"{kind} {token}"))

    def _follow(self) -> None:
        delay_s, told = _RETRY_S[0], ""
        while not self._closed.is_set():
            began = time.monotonic()
            try:
                self._ask(self._pull)
            except SourceError as error:
                if str(error) != told and not self._closed.is_set():
                    told = str(error)
                    log.warning("stream %s: cannot receive events from the camera: %s", self._name, error)
            except Exception:  # a bug must not end the process silently
                log.exception("stream %s: cannot receive events from the camera", self._name)
            with self._lock:
                self._known = False
                self._on, self._off_at = set(), {}
            delay_s = _RETRY_S[0] if time.monotonic() - began > _RETRY_S[1] else min(2 * delay_s, _RETRY_S[1])
            self._closed.wait(delay_s)

    async def _pull(self, device: Any) -> None:
        """Receive the event messages of a connected ONVIF device until `closed` is set."""
        lost: list[bool] = []
        manager = await device.create_pullpoint_manager(timedelta(seconds=_SUBSCRIBED_S), lambda: lost.append(True))
        try:
            await manager.set_synchronization_point()  # the camera then sends the state of every signal
            service = manager.get_service()
            while not self._closed.is_set() and not lost:
                reply = await service.PullMessages({"MessageLimit": 100, "Timeout": timedelta(seconds=_PULL_S)})
                with self._lock:
                    if not self._known:
                        log.info("stream %s: receiving events from the camera", self._name)
                    self._known = True
                    for message in reply.NotificationMessage or []:
                        self._take(message)
        finally:
            await manager.shutdown()
        if lost:
            raise LiveError("connection failed", "the camera has ended the subscription")

    def _take(self, message: Any) -> None:
        topic = str(getattr(message.Topic, "_value_1", "") or "")
        kind = next((kind for end, kind in _KINDS.items() if topic.endswith(end)), None)
        content = getattr(message.Message, "_value_1", None)
        if kind is None or content is None:
            return
        state = next((value for name, value in _items(content, "Data") if name in _STATES), None)
        if state is None:
            return
        signal = kind, next((value for _, value in _items(content, "Source")), "")
        if state.lower() in ("true", "1"):
            self._on.add(signal)
        elif signal in self._on:
            self._on.discard(signal)
            self._off_at[signal] = time.monotonic()


def _items(content: Any, part: str) -> list[tuple[str, str]]:
    """Return the (name, value) pairs of a section of an ONVIF event message, such as the section "Source" or "Data"."""
    items = getattr(getattr(content, part, None), "SimpleItem", None) or []
    return [(str(item.Name), str(item.Value)) for item in items]
