"""One rule in one stream, as a state machine: scenes in, beginnings, changes and ends of its events out.

Pure: times come with the scenes. A rule has one event at a time, which lists every track that fulfils the condition
while it goes on. Knows scenes and conditions; no frames, models or threads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from saccade.pipeline.events.conditions import Condition
from saccade.pipeline.events.questions import Answer, Question, Questions
from saccade.pipeline.events.record import Change, Event, Kind, new_id
from saccade.pipeline.events.scene import Scene, Track
from saccade.pipeline.events.settings import RuleSettings

GAP_S = 30.0
"""Seconds without a frame after which what was there before counts no more: nobody has watched."""

RESUME_S = 15.0
"""Seconds from when an event was seen last to the first frame of its stream elsewhere, within which it may go on."""

SETTLE_S = 5.0
"""Seconds from that frame on, within which its condition must hold again: objects are found, tracked, asked about."""

_MOST_TRACKS = 1000
"""That an event lists. One of a busy street has no end: after 20,000 tracks each update was a record of 140 kB, twice a
second."""

_CLOCK_STEP_S = 5.0  # between two clocks: one of them was set
_RISE = 0.05  # of the best score, that makes an update
_SURER = 0.1  # of p(yes), likewise

Names = Mapping[str, Collection[str]]
"""A label as a rule has it → as the model says it, for those that differ."""


class Moment(NamedTuple):
    """A time on three clocks: seconds of the stream, those of `Frame.steady_at`, and those that people are shown."""

    seconds: float
    steady_at: float
    captured_at: float


class Watch:
    """Whether a condition holds, from scene to scene, and for which tracks.

    Args:
        condition: what is watched.
        names: what its labels are called.
        gap_s: seconds without a frame, after which what was there before counts no more.
    """

    def __init__(self, condition: Condition, names: Names | None = None, gap_s: float = GAP_S) -> None:
        self.condition = condition
        self._gap_s = gap_s
        known = names or {}
        self._labels = {name for label in condition.labels for name in known.get(label, (label,))}
        self._last_s: float | None = None
        self._since: dict[int, Moment] = {}  # track → since when it is so
        self._held: Moment | None = None  # likewise, of the frame as a whole
        self.carried_until = float("-inf")
        """Until these seconds of the stream what holds counts as having held for long enough: it did so elsewhere."""

    def update(self, scene: Scene) -> dict[int, Moment] | None:
        """Take a scene; return the tracks for which it holds, each with the moment since when; None if for none.

        Of a condition on the frame as a whole that holds, those that it counts, under -1 its own time.
        """
        if self._last_s is not None and not 0 <= scene.seconds - self._last_s <= self._gap_s:
            self._since, self._held = {}, None
        first, self._last_s = self._last_s is None, scene.seconds
        kind, now = self.condition.kind, Moment(scene.seconds, scene.steady_at, scene.captured_at)
        if not self._has_place(scene):
            self._since, self._held = {}, None
            return None
        found = {track.number: track for track in self._concerned(scene)}
        if kind in ("count", "absent"):
            holds = not found if kind == "absent" else self.condition.fits(len(found))
            if not holds:
                self._held = None if kind == "count" else now  # absent since it was seen last
                return None
            if self._held is None or (first and kind == "absent"):
                self._held = now
            ready = scene.seconds - self._held.seconds >= self._for_s(scene) and self.condition.open_at(scene.clock)
            return {-1: self._held, **dict.fromkeys(found, self._held)} if ready else None
        self._since = {number: self._since.get(number, now) for number in found}
        if not self.condition.open_at(scene.clock):
            return None
        held = {one: since for one, since in self._since.items() if self._long_enough(scene, one, since.seconds)}
        return held or None

    def _has_place(self, scene: Scene) -> bool:
        """Whether the zone or line is there, which may be removed at any time: nothing is absent from what is not."""
        place = self.condition.place
        return place is None or place in (scene.crossed if self.condition.kind == "crosses" else scene.zones)

    def _concerned(self, scene: Scene) -> Iterable[Track]:
        """The tracks that the condition is about, as they are now."""
        tracks: Iterable[Track] = scene.tracks.values()
        place, kind = self.condition.place, self.condition.kind
        if self._labels:
            tracks = [track for track in tracks if track.label in self._labels]
        if kind == "crosses":
            ways, wanted = scene.crossed.get(place or "", {}), self.condition.direction
            return [track for track in tracks if track.number in ways and wanted in (None, ways[track.number])]
        if kind == "absent":
            tracks = [track for track in tracks if scene.seen(track)]
        if place is not None:
            inside = scene.zones.get(place, {})
            tracks = [track for track in tracks if track.number in inside]
        return tracks

    def _for_s(self, scene: Scene) -> float:
        return 0.0 if scene.seconds <= self.carried_until else self.condition.for_s

    def _long_enough(self, scene: Scene, number: int, since_s: float) -> bool:
        """Whether it has held for a track for the time of the rule; the zone itself knows best for how long."""
        if self.condition.kind == "inside":
            return scene.zones[self.condition.place or ""][number] >= self._for_s(scene) - 1e-6
        if self.condition.kind == "present":
            since_s = min(since_s, scene.tracks[number].first_s)
        return scene.seconds - since_s >= self._for_s(scene) - 1e-6


@dataclass(slots=True, frozen=True)
class RuleState:
    """How a rule is doing at the moment.

    Attributes:
        name: of the rule.
        holds: whether its condition is fulfilled, whatever a model answers.
        p_yes: the probability of yes to its question, of the track for which it is most like what is expected; None
            while there is no answer about any that fulfils the condition.
        event: the id of the event that goes on; None if none does.
        since: when that began, as frames have it in `captured_at`.
    """

    name: str
    holds: bool
    p_yes: float | None
    event: str | None
    since: float | None


class RuleMachine:
    """The events of one rule in one stream.

    Args:
        rule: what it watches.
        stream: name of the stream.
        names: what the labels of the rule are called.
        gap_s: as in `Watch`.
        chance: returns random numbers from 0 to 1, for the ids.
        resumed: the last event of when the stream ran last, elsewhere. If it went on, it does so under its id if the
            first frame here was captured within `RESUME_S` of the last one that showed it, and the condition holds
            within `SETTLE_S` of that, whatever its `for`; else it ends when it was seen last. If it had ended, its
            cooldown goes on.
    """

    def __init__(
        self,
        rule: RuleSettings,
        stream: str,
        names: Names | None = None,
        *,
        gap_s: float = GAP_S,
        chance: Callable[[], float] = random.random,
        resumed: Event | None = None,
    ) -> None:
        self.rule = rule
        self._stream = stream
        self._chance = chance
        self._gap_s = gap_s
        self._watch = Watch(rule.condition, names, gap_s)
        self._questions = Questions(rule)
        self._held: dict[int, Moment] = {}  # the tracks that fulfil the condition, whatever the answers
        self._crossed: dict[int, tuple[Track, Moment]] = {}  # while answers may come: as it was then, and when
        self._answered: set[int] = set()  # those of them about which all is known
        ended = resumed is not None and resumed.end_time is not None
        self._ended_before = resumed if ended else None
        resumed = None if ended else resumed
        self._event = resumed
        self._published = resumed
        self._resuming = resumed is not None  # its condition has not held here yet
        if resumed is not None:
            self._watch.carried_until = float("inf")
        self._free_at = float("-inf")  # seconds of the stream, before which none begins
        self._first_s: float | None = None
        self._last_s = 0.0

    @property
    def event(self) -> Event | None:
        """The event that goes on; None if none does."""
        return self._event

    @property
    def state(self) -> RuleState:
        """How the rule is doing. May be read from any thread."""
        held, event = self._held, self._event
        p_yes = self._questions.p_yes(list(held)) if held else None
        running = (None, None) if event is None else (event.id, event.start_time)
        return RuleState(self.rule.name, bool(held), p_yes, *running)

    def step(self, scene: Scene) -> list[Change]:
        """Take the next scene, and return what has changed."""
        changes: list[Change] = []
        if self._first_s is None:
            self._first_s = scene.seconds
            if self._ended_before is not None and scene.capture_clock != "file":
                passed_s = scene.captured_at - (self._ended_before.end_time or 0.0)
                self._free_at = scene.seconds + self.rule.cooldown - max(0.0, passed_s)
            if self._event is not None and not _soon_after(self._event, scene):
                changes += self._stop(scene.seconds - max(0.0, scene.captured_at - self._event.frame_time))
        elif scene.seconds < self._last_s or scene.seconds - self._last_s > self._gap_s:
            changes += self.end()
            self._crossed = {}
        if scene.seconds < self._last_s:
            self._free_at = float("-inf")
        self._last_s = scene.seconds
        self._held = self._with_crossed(scene, self._watch.update(scene) or {})
        held = self._questions.agreed(self._held)
        self._answered = {number for number in held if not self._questions.lacks(number, number in scene.tracks)}
        if not held:
            if self._resuming and scene.seconds <= self._first_s + SETTLE_S and self.rule.condition.kind != "crosses":
                return changes
            return [*changes, *self._stop(scene.seconds)]
        if self._event is None:
            if scene.seconds >= self._free_at:
                self._event = self._begin(scene, held)
                changes.append(self._publish("begin"))
            return changes
        self._event = self._renewed(self._event, scene, held)
        if self._resuming or self._worth_an_update(self._event):
            changes.append(self._publish("update"))
        if self._resuming:
            self._resuming = False
            self._watch.carried_until = scene.seconds + self.rule.condition.for_s + SETTLE_S
        return changes

    def questions(self, scene: Scene) -> list[Question]:
        """What is to be asked about the scene of the last step; each counts as asked, unless it is refused."""
        return self._questions.due(scene, self._held) if self.rule.asks else []

    def refuse(self, question: Question) -> None:
        """Take note that a question was not asked."""
        self._questions.refuse(question)

    def take(self, answer: Answer) -> None:
        """Take an answer, which counts from the next step on."""
        self._questions.take(answer)

    def attributes(self, track: int) -> dict[str, str]:
        """What is known of a track, by the names of the rule's attributes."""
        return self._questions.attributes(track)

    def end(self) -> list[Change]:
        """End the event that goes on, since nothing more comes, or nobody has watched."""
        return self._stop(self._last_s)

    def _with_crossed(self, scene: Scene, held: dict[int, Moment]) -> dict[int, Moment]:
        """A crossing is over when it is asked about: it holds until the answers, and on the frame that has them."""
        if self.rule.condition.kind != "crosses" or not self.rule.asks:
            return held
        self._crossed = {
            number: one
            for number, one in self._crossed.items()
            if number not in self._answered and self._questions.may_agree(number, number in scene.tracks)
        } | {number: (scene.tracks[number], at) for number, at in held.items()}
        return {number: at for number, (_, at) in self._crossed.items()}

    def _stop(self, seconds: float) -> list[Change]:
        if self._event is None:
            return []
        self._event = replace(self._event, end_time=_end_time(self._event), count=0)
        change = self._publish("end")
        self._event = self._published = None
        self._resuming, self._watch.carried_until = False, float("-inf")
        self._free_at = seconds + self.rule.cooldown
        return [change]

    def _begin(self, scene: Scene, held: dict[int, Moment]) -> Event:
        since = min(held.values())
        first = next(iter(self.rule.condition.labels), "")
        event = Event(
            id=new_id(scene.captured_at, self._chance),
            rule=self.rule.name,
            stream=self._stream,
            label=first,
            tracks=(),
            zones=(),
            entered_zones=(),
            since=since.captured_at,
            start_time=scene.captured_at,
            end_time=None,
            frame_time=scene.captured_at,
            capture_clock=scene.capture_clock,
            score=0.0,
            top_score=0.0,
            box=None,
            width=scene.width,
            height=scene.height,
            since_at=since.steady_at,
            start_at=scene.steady_at,
            frame_at=scene.steady_at,
        )
        return self._renewed(event, scene, held)

    def _renewed(self, event: Event, scene: Scene, held: dict[int, Moment]) -> Event:
        there = {number: track for number, (track, _) in self._crossed.items()} | dict(scene.tracks)
        tracks = [there[number] for number in held if number in there]
        seen = [track for track in tracks if scene.seen(track)]
        numbers = tuple(dict.fromkeys((*event.tracks, *(track.number for track in tracks))))[-_MOST_TRACKS:]
        zones = tuple(dict.fromkeys(zone for track in tracks for zone in track.zones))
        found: dict[str, Any] = {}
        if self.rule.asks:
            found["p_yes"] = self._questions.p_yes(list(held))
            found["answers"] = {**event.answers, **self._questions.answers(numbers)}
            known = {name: text for track in numbers for name, text in self._questions.attributes(track).items()}
            found["attributes"] = known or event.attributes
        # What is hidden at the very moment of the beginning is as sure as when it was seen last, but nowhere.
        if shown := seen or (tracks if event.box is None else []):
            best = max(shown, key=lambda track: track.score)
            top = max(event.top_score, best.score)
            found |= {"label": best.label, "score": best.score, "top_score": top}
        if seen:
            found |= {"box": best.box, "speed": best.speed}
        if seen or not tracks:  # hidden ones may be found again, or have gone: the event ends where one was seen last
            found |= {"frame_time": scene.captured_at, "frame_at": scene.steady_at}
        return replace(
            event,
            tracks=numbers,
            zones=zones,
            entered_zones=tuple(dict.fromkeys((*event.entered_zones, *zones))),
            count=len(tracks),
            **found,
        )

    def _worth_an_update(self, event: Event) -> bool:
        old = self._published
        if old is None:
            return False
        if (event.tracks, event.zones, event.attributes) != (old.tracks, old.zones, old.attributes):
            return True
        if abs((event.p_yes or 0.0) - (old.p_yes or 0.0)) >= _SURER:
            return True
        counts = self.rule.condition.kind == "count" and event.count != old.count
        return counts or event.top_score >= old.top_score + _RISE

    def _publish(self, kind: Kind) -> Change:
        assert self._event is not None
        self._published = self._event
        return Change(kind, self._event)


def _end_time(event: Event) -> float:
    """When an event was seen last, as people are shown it; as long after its beginning as it has lasted.

    The clock may have been set meanwhile; and those of machines that it went on at may differ.
    """
    lasted = event.frame_at - event.start_at
    if math.isfinite(lasted) and abs(event.frame_time - event.start_time - lasted) > _CLOCK_STEP_S:
        return event.start_time + lasted
    return max(event.start_time, event.frame_time)


def _soon_after(event: Event, scene: Scene) -> bool:
    """Whether a stream was away for so short a time that an event of it may go on; a file begins anew."""
    return scene.capture_clock != "file" and abs(scene.captured_at - event.frame_time) <= RESUME_S
