"""The stage of a stream that evaluates its rules and publishes events.

Any thread can change the rules while the stream runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from saccade.engine.results import Result
from saccade.pipeline.analytics.counts import Minute
from saccade.pipeline.events.machine import GAP_S, RuleMachine, RuleState
from saccade.pipeline.events.record import (
    Change,
    Event,
    EventLook,
    History,
    MinuteCounts,
    RuleList,
    make_event_record,
    read_event,
)
from saccade.pipeline.events.scene import Scene, SceneReader
from saccade.pipeline.events.settings import EventSettings, RuleSettings
from saccade.pipeline.events.storage.recorder import Recorder
from saccade.pipeline.events.verdicts import Look

if TYPE_CHECKING:
    from saccade.pipeline.events.asking import Asker
    from saccade.sources import Frame

Publish = Callable[[Change | RuleList | History], None]
"""Publishes a change of an event without blocking."""


Signals = Callable[[], frozenset[str] | None]
"""Returns the signals that the camera reports, such as `motion`; None if unknown."""


@dataclass(slots=True, frozen=True)
class Attributes:
    """The attributes of a track in the result of a frame. The values are answers of the model, by attribute name."""

    key: ClassVar[str] = "attributes"
    track_id: int
    values: Mapping[str, str]

    def to_record(self, width: int, height: int) -> dict[str, object]:
        """Return a JSON object with the track ID and the attributes."""
        return {"track_id": self.track_id, **self.values}


class EventStage:
    """Evaluates the rules of one stream. This stage must run after the analytics stage.

    Args:
        rules: the rules to evaluate.
        publish: called with every change of an event, in the thread of the stream.
        names: returns the model's labels for a label of a rule.
        asker: asks the model the questions of rules. If None, rules with questions create no events.
        file_began: Unix time of the first frame of a video file, used for `between`; default: now.
        flush: called after the last change of the stream.
        gap_s: maximum time between two frames, in seconds. After a longer gap, the evaluation of rules restarts. It
            must be longer than the longest pause that a motion gate causes.
        recorder: records clips and snapshots of the events; None disables recording.
        minutes: returns the counts of the minutes that ended since the last call. Called with True, it also returns
            the current minute. If `minutes` is set, the stage also publishes track paths, and counts per minute of live
            streams.
        look: returns the appearance descriptor of an object, see `Engine.look`. If `look` is set, the stage publishes
            the descriptor of the object of each new event.
        signals: returns the signals of the camera, for rules with `camera reports`; None if the source reports none.
    """

    def __init__(
        self,
        rules: Sequence[RuleSettings],
        publish: Publish,
        *,
        names: Callable[[str], Collection[str]] = lambda label: (label,),
        asker: Asker | None = None,
        file_began: float | None = None,
        flush: Callable[[], object] = lambda: None,
        minutes: Callable[[bool], list[Minute]] | None = None,
        recorder: Recorder | None = None,
        gap_s: float = GAP_S,
        look: Look | None = None,
        signals: Signals | None = None,
    ) -> None:
        self._publish = publish
        self._look = look
        self._signals = signals
        self._flush = flush
        self._recorder = recorder
        self._gap_s = gap_s
        self._media: dict[str, tuple[str | None, str | None]] = {}  # HTTP paths, by event
        self._minutes = minutes
        self._live = False
        self._stream = ""
        self._names = names
        self._asker = asker
        self._reader = SceneReader(time.time() if file_began is None else file_began)
        self._rules = tuple(rules)  # replaced as a whole, from any thread
        self._shown: tuple[RuleSettings, ...] = ()  # the rules that subscribers know
        self._machines: dict[str, RuleMachine] = {}
        self._begun = 0
        self._resumed: dict[str, Event] = {}
        self.moves = False
        """Whether the stream moves to another worker; `close` then leaves open events to that worker."""
        self.left: list[Event] = []
        """The open events that `close` did not end, for `resume` on another worker."""

    def resume(self, events: Iterable[Event]) -> None:
        """Continue events that began on another worker. Call this method before the first frame.

        Args:
            events: for each rule, its open event, or else its last ended event.
        """
        self._resumed = {event.rule: event for event in events}

    def configure(self, settings: EventSettings) -> None:
        """Replace the rules from the next frame on. Thread-safe.

        Events of unchanged rules continue. All other events end.
        """
        self._rules = tuple(settings.rules)

    @property
    def kept(self) -> dict[str, int]:
        """The number of open events (`events`) and unwritten clips (`clips`), and the buffered bytes (`clip_bytes`)."""
        going = sum(machine.event is not None for machine in list(self._machines.values()))
        return {"events": going, **(self._recorder.kept if self._recorder is not None else {})}

    @property
    def begun(self) -> int | None:
        """The number of events that have begun. None if there are no rules. Thread-safe."""
        return self._begun if self._rules or self._begun else None

    @property
    def states(self) -> list[RuleState]:
        """The `RuleState` of each rule after the newest frame. Thread-safe."""
        return [machine.state for machine in self._machines.values()]

    @property
    def seen(self) -> dict[str, float]:
        """The capture time of the newest frame that shows each open event, by event ID. Thread-safe."""
        going = [*self._resumed.values(), *(machine.event for machine in self._machines.values())]
        return {event.id: event.frame_time for event in going if event is not None and event.end_time is None}

    def process(self, frame: Frame, result: Result) -> Result:
        """Evaluate all rules on a frame. Return the frame's result, with the attributes of its tracks added."""
        rules = self._rules
        if not rules and not self._machines and not self._resumed and self._minutes is None:
            return result
        self._stream = frame.stream
        scene = self._reader.read(frame, result)
        if self._signals is not None and any(rule.condition.kind == "reports" for rule in rules):
            scene = replace(scene, signals=self._signals() or frozenset())
        if rules is not self._shown:
            self._replace_rules(rules, frame.stream)
        machines = self._machines
        asking_of = [machine for machine in machines.values() if machine.rule.attributes]
        if self._asker is not None:
            for answer in self._asker.answers():
                if (asking := machines.get(answer.question.rule)) is not None:
                    asking.questions.take(answer)
        for machine in machines.values():
            changes = machine.step(scene)
            self._tell(changes)
            if self._look is not None:
                self._tell_looks(changes, frame, self._look)
        for machine in machines.values():  # after all events: measuring sharpness takes milliseconds
            if self._asker is not None:
                self._ask(self._asker, machine, scene, frame)
            if self._recorder is not None and machine.event is not None:
                self._recorder.note(machine.event, frame, result.segments)
        if self._recorder is not None:
            self._recorder.advance(frame.steady_at)
        if self._minutes is not None:
            self._live = frame.capture_clock != "file"
            self._tell_history()
        known = tuple(
            Attributes(number, found)
            for number in scene.tracks
            if (found := {name: text for one in asking_of for name, text in one.questions.attributes(number).items()})
        )
        if known:
            return replace(result, extras={**result.extras, Attributes.key: known})
        return result

    def close(self) -> None:
        """End the open events. If the stream is moving to another worker, leave its events open for that worker."""
        if self.moves:
            self.left = self._going()
        else:
            for machine in self._machines.values():
                self._tell(machine.end())
            self._end_resumed()
        self._machines = {}
        if self._asker is not None:
            self._asker.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._minutes is not None:
            self._reader.end(self._stream)
            self._tell_history(last=True)
        self._flush()

    def _going(self) -> list[Event]:
        """Return the last event of each rule. The event includes the paths of its media files."""
        found = [*self._resumed.values(), *(one.event for one in self._machines.values() if one.event is not None)]
        return [read_event(make_event_record(Change("update", self._with_media(event)))) for event in found]

    def _with_media(self, event: Event) -> Event:
        snapshot, clip = self._media.get(event.id, (event.snapshot, event.clip))
        return replace(event, snapshot=snapshot, clip=clip)

    def _replace_rules(self, rules: tuple[RuleSettings, ...], stream: str) -> None:
        """Replace the rules. Events of removed or changed rules end."""
        self._shown = rules
        keep_s = {rule.name: rule.keep for rule in rules if rule.keep is not None}
        self._publish(RuleList(stream, tuple(rule.name for rule in rules), keep_s))
        machines = {rule.name: self._machine_of(rule, stream) for rule in rules}
        kept = {event.rule: event for event in self._resumed.values() if event.rule not in machines}
        for name, machine in self._machines.items():
            if machines.get(name) is not machine:
                self._tell(machine.end())
        self._machines, self._resumed = machines, kept
        self._end_resumed()

    def _end_resumed(self) -> None:
        for event in self._resumed.values():
            if event.end_time is not None:
                continue
            self._tell([Change("end", replace(event, end_time=max(event.start_time, event.frame_time), count=0))])
        self._resumed = {}

    def _ask(self, asker: Asker, machine: RuleMachine, scene: Scene, frame: Frame) -> None:
        for question in machine.due(scene):
            if not asker.ask(question, scene, frame.image):
                machine.questions.refuse(question)

    def _machine_of(self, rule: RuleSettings, stream: str) -> RuleMachine:
        old = self._machines.get(rule.name)
        if old is not None and old.rule == rule:
            return old
        names = {label: self._names(label) for label in rule.condition.labels}
        resumed = self._resumed.get(rule.name)
        if resumed is not None and resumed.end_time is None and self._recorder is not None:
            self._media[resumed.id] = resumed.snapshot, resumed.clip
            self._recorder.resume(resumed)
        return RuleMachine(rule, stream, names, gap_s=self._gap_s, resumed=resumed)

    def _tell_history(self, last: bool = False) -> None:
        for path in self._reader.take_ended():
            self._publish(path)
        if self._minutes is not None and self._live:
            for one in self._minutes(last):
                self._publish(MinuteCounts(self._stream, one.start, asdict(one.counts)))

    def _tell_looks(self, changes: list[Change], frame: Frame, look: Look) -> None:
        for event in (change.event for change in changes if change.kind == "begin"):
            if event.box is not None:
                found = look(frame.image, event.box).astype(np.float16)
                self._publish(EventLook(event.stream, event.id, found.tobytes()))

    def _tell(self, changes: list[Change]) -> None:
        for change in changes:
            event = change.event
            self._begun += change.kind == "begin"
            if self._recorder is not None:
                if change.kind == "begin":
                    clip = f"/events/{event.id}/clip.mp4" if self._recorder.has_clips else None
                    self._media[event.id] = f"/events/{event.id}/snapshot.jpg", clip
                event = self._with_media(event)
                if change.kind == "end":
                    self._recorder.finish(event)
                    self._media.pop(event.id, None)
            self._publish(Change(change.kind, event))
