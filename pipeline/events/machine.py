"""Evaluates one rule in one stream as a state machine.

The state machine receives scenes (the tracks, zones and lines of one frame), and starts, updates and ends events. A
scene contains its times, so the state machine does not read the system clock. A rule has at most one open event. The
event lists every track that has fulfilled the condition.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from saccade.pipeline.events.conditions import Condition
from saccade.pipeline.events.places import REMOVED_S, STILL_S
from saccade.pipeline.events.questions import Question, Questions
from saccade.pipeline.events.record import Change, Event, Kind, new_id
from saccade.pipeline.events.scene import Scene, Track
from saccade.pipeline.events.settings import RuleSettings

GAP_S = 30.0
"""Seconds without a frame after which the evaluation of a rule restarts."""

RESUME_S = 15.0
"""Maximum seconds between an event's last frame and the first frame on another worker for the event to continue."""

SETTLE_S = 5.0
"""Seconds after the first frame on another worker within which the condition must be fulfilled again. Detection and
questions take time."""

_MOST_TRACKS = 1000
"""Maximum number of tracks that an event lists. On a busy street, an event may never end. Without the limit, its
updates would grow to 140 kB each, twice a second."""

_CLOCK_STEP_S = 5.0  # a larger difference between two clocks means that one was set
_RISE = 0.05  # rise of the best score that causes an update
_SURER = 0.1  # change of p(yes) that causes an update

Names = Mapping[str, Collection[str]]
"""For each label of a rule, the model's labels, if they differ."""


class Moment(NamedTuple):
    """A point in time as stream time, monotonic time (`Frame.steady_at`) and capture time, all in seconds."""

    seconds: float
    steady_at: float
    captured_at: float


class Watch:
    """Evaluates the condition of a rule on each scene (the tracks, zones and lines of one frame) of a stream.

    Args:
        condition: the condition.
        names: the model's labels for each label of the condition.
        gap_s: maximum time between two frames, in seconds. After a longer gap, the evaluation restarts.
        confirm: (k, n): ignore a track until it has been detected on k of its last n frames.
    """

    def __init__(
        self,
        condition: Condition,
        names: Names | None = None,
        gap_s: float = GAP_S,
        confirm: tuple[int, int] = (1, 1),
    ) -> None:
        self.condition = condition
        self._gap_s = gap_s
        self._least, self._looks = confirm[0], (1 << confirm[1]) - 1
        self._confirmed: set[int] = set()
        self._told: set[int] = set()  # places of objects for which the condition has held: it holds once for each
        self._holding: set[int] = set()  # those for which it holds now
        known = names or {}
        self._labels = {name for label in condition.labels for name in known.get(label, (label,))}
        self._last_s: float | None = None
        self._since: dict[int, Moment] = {}  # track → time since when the condition has held
        self._held: Moment | None = None  # the same for a condition on the whole frame
        self.carried_until = float("-inf")
        """Stream time until which `for` counts as fulfilled, because the condition was fulfilled on another worker."""

    def update(self, scene: Scene) -> dict[int, Moment] | None:
        """Evaluate the condition on the next scene.

        Returns:
            The time since which each track fulfils the condition, by track ID (-1 for the whole frame), or None if the
            condition is not fulfilled.
        """
        if self._last_s is not None and not 0 <= scene.seconds - self._last_s <= self._gap_s:
            self._since, self._held = {}, None
        first, self._last_s = self._last_s is None, scene.seconds
        kind, now = self.condition.kind, Moment(scene.seconds, scene.steady_at, scene.captured_at)
        if not self._has_place(scene):
            self._since, self._held = {}, None
            return None
        if kind == "removed":
            return self._removed(scene, now)
        found: dict[int, Track] = {}
        if kind == "reports":
            holds = self.condition.signal in scene.signals
        else:
            found = {track.number: track for track in self._confirmed_of(scene, self._concerned(scene))}
            holds = not found if kind == "absent" else self.condition.fits(len(found))
        if kind in ("count", "absent", "reports"):
            if not holds:
                self._held = now if kind == "absent" else None  # absent since the last sighting
                return None
            if self._held is None or (first and kind == "absent"):
                self._held = now
            ready = scene.seconds - self._held.seconds >= self._for_s(scene) and self.condition.open_at(scene.clock)
            return {-1: self._held, **dict.fromkeys(found, self._held)} if ready else None
        self._since = {n: self._since.get(n) or self._began(scene, track, now) for n, track in found.items()}
        if not self.condition.open_at(scene.clock):
            self._holding = set()
            return None
        held = {one: since for one, since in self._since.items() if self._long_enough(scene, since.seconds)}
        if self.condition.motion in ("stationary", "appeared"):
            held = self._once(scene, held)
        return held or None

    def _began(self, scene: Scene, track: Track, now: Moment) -> Moment:
        """Return the time from which a track counts as fulfilling the condition, which can be before this frame."""
        if self.condition.kind not in ("inside", "present") or self.condition.motion in ("moving", "stationary"):
            return now
        past_s = scene.seconds - track.first_s
        if self.condition.kind == "inside":
            past_s = min(past_s, scene.zones[self.condition.place or ""][track.number])
        return Moment(*(at - max(0.0, past_s) for at in now))

    def _once(self, scene: Scene, held: dict[int, Moment]) -> dict[int, Moment]:
        """Return the tracks in `held` whose object has not already started an event."""
        places = {number: rest.place for number in held if (rest := scene.tracks[number].rest) is not None}
        kept = {n: held[n] for n, place in places.items() if place in self._holding or place not in self._told}
        self._holding = {places[number] for number in kept}
        self._told = set(sorted(self._told | self._holding)[-_MOST_TRACKS:])
        return kept

    def _removed(self, scene: Scene, now: Moment) -> dict[int, Moment] | None:
        due = {}
        for number, (track, empty_s) in scene.empty.items():
            place = self.condition.place
            fits = (not self._labels or track.label in self._labels) and (place is None or place in track.zones)
            if fits and empty_s >= max(REMOVED_S, self.condition.for_s) and number not in self._told:
                due[number] = track
        self._told = {number for number in self._told if number in scene.empty} | set(due)
        return {track.number: now for track in due.values()} if due and self.condition.open_at(scene.clock) else None

    def _confirmed_of(self, scene: Scene, tracks: Iterable[Track]) -> Iterable[Track]:
        if self._least == 1:
            return tracks
        fresh = {one.number for one in tracks if (one.looks & self._looks).bit_count() >= self._least}
        self._confirmed = {number for number in self._confirmed if number in scene.tracks} | fresh
        return [track for track in tracks if track.number in self._confirmed]

    def _has_place(self, scene: Scene) -> bool:
        """Return whether the zone or line of the condition exists."""
        place = self.condition.place
        return place is None or place in (scene.crossed if self.condition.kind == "crosses" else scene.zones)

    def _concerned(self, scene: Scene) -> Iterable[Track]:
        tracks: Iterable[Track] = scene.tracks.values()
        place, kind = self.condition.place, self.condition.kind
        if self._labels:
            tracks = [track for track in tracks if track.label in self._labels]
        if self.condition.motion is not None:
            tracks = [track for track in tracks if self._moves(scene, track)]
        if kind == "crosses":
            ways, wanted = scene.crossed.get(place or "", {}), self.condition.direction
            return [track for track in tracks if track.number in ways and wanted in (None, ways[track.number])]
        if kind == "absent":
            tracks = [track for track in tracks if scene.seen(track)]
        if place is not None:
            inside = scene.zones.get(place, {})
            tracks = [track for track in tracks if track.number in inside]
        return tracks

    def _moves(self, scene: Scene, track: Track) -> bool:
        """Return whether the motion of a track's object (moving, stationary or appeared) matches the condition."""
        rest, motion = track.rest, self.condition.motion
        if rest is None:
            return False
        if motion == "moving":
            return rest.moving(scene.seconds)
        if motion == "appeared":
            return not rest.known
        least_s = (self.condition.for_s or STILL_S) if scene.seconds > self.carried_until else 0.0
        return rest.stationary_for(scene.seconds) >= least_s - 1e-6

    def _for_s(self, scene: Scene) -> float:
        return 0.0 if scene.seconds <= self.carried_until else self.condition.for_s

    def _long_enough(self, scene: Scene, since_s: float) -> bool:
        if self.condition.motion == "stationary":
            return True  # its time counts from when it came to its place
        return scene.seconds - since_s >= self._for_s(scene) - 1e-6


@dataclass(slots=True, frozen=True)
class RuleState:
    """The current state of a rule.

    Attributes:
        name: name of the rule.
        holds: whether the condition is fulfilled. Answers of the model are not considered.
        p_yes: the model's probability of "yes" to the rule's question, for the track that matches the rule best, or
            None if the model has not answered.
        event: ID of the open event, or None.
        since: start time of the open event, on the clock of `Frame.captured_at`.
    """

    name: str
    holds: bool
    p_yes: float | None
    event: str | None
    since: float | None


class RuleMachine:
    """Evaluates one rule in one stream, and creates its events.

    Attributes:
        questions: the questions of the rule, and the model's answers.
        event: the open event of the rule, or None.

    Args:
        rule: the rule to evaluate.
        stream: name of the stream.
        names: the model's labels for each label of the rule.
        gap_s: maximum time between two frames, in seconds. After a longer gap, the evaluation restarts.
        chance: returns random numbers from 0 to 1, used for event IDs.
        resumed: last event of the rule on the previous worker of the stream. An open event continues under the same ID
            under two conditions: the first frame on this worker follows the event's last frame within `RESUME_S`, and
            the condition is fulfilled again within `SETTLE_S`, regardless of `for`. Otherwise the event ends at its
            last frame. The cooldown of an ended event continues.
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
        self._watch = Watch(rule.condition, names, gap_s, rule.confirm_looks)
        self.questions = Questions(rule)
        self._held: dict[int, Moment] = {}  # the tracks that fulfil the condition, regardless of answers
        # Crossings that wait for answers: track and time of the crossing.
        self._crossed: dict[int, tuple[Track, Moment]] = {}
        self._answered: set[int] = set()  # crossed tracks whose answers are complete
        ended = resumed is not None and resumed.end_time is not None
        self._ended_before = resumed if ended else None
        resumed = None if ended else resumed
        self.event = resumed
        self._published = resumed
        self._resuming = resumed is not None  # whether a resumed event still waits for its condition
        if resumed is not None:
            self._watch.carried_until = float("inf")
        self._free_at = float("-inf")  # stream time before which no event begins
        self._first_s: float | None = None
        self._last_s = 0.0

    @property
    def state(self) -> RuleState:
        """The current state of the rule. Thread-safe."""
        held, event = self._held, self.event
        p_yes = self.questions.p_yes(list(held)) if held else None
        running = (None, None) if event is None else (event.id, event.start_time)
        return RuleState(self.rule.name, bool(held), p_yes, *running)

    def step(self, scene: Scene) -> list[Change]:
        """Evaluate the rule on the next scene (the tracks of a frame). Return the event changes."""
        changes: list[Change] = []
        if self._first_s is None:
            self._first_s = scene.seconds
            if self._ended_before is not None and scene.capture_clock != "file":
                passed_s = scene.captured_at - (self._ended_before.end_time or 0.0)
                self._free_at = scene.seconds + self.rule.cooldown - max(0.0, passed_s)
            if self.event is not None and not _soon_after(self.event, scene):
                changes += self._stop(scene.seconds - max(0.0, scene.captured_at - self.event.frame_time))
        elif scene.seconds < self._last_s or scene.seconds - self._last_s > self._gap_s:
            changes += self.end()
            self._crossed = {}
        if scene.seconds < self._last_s:
            self._free_at = float("-inf")
        self._last_s = scene.seconds
        self._held = self._with_crossed(scene, self._watch.update(scene) or {})
        held = self.questions.agreed(self._held)
        self._answered = {number for number in held if not self.questions.lacks(number, number in scene.tracks)}
        if not held:
            if (
                self._resuming
                and scene.seconds <= self._first_s + SETTLE_S
                and self.rule.condition.kind not in ("crosses", "removed")
            ):
                return changes
            return [*changes, *self._stop(scene.seconds)]
        if self.event is None:
            if scene.seconds >= self._free_at:
                self.event = self._begin(scene, held)
                changes.append(self._publish("begin"))
            return changes
        self.event = self._renewed(self.event, scene, held)
        if self._resuming or self._worth_an_update(self.event):
            changes.append(self._publish("update"))
        if self._resuming:
            self._resuming = False
            self._watch.carried_until = scene.seconds + self.rule.condition.for_s + SETTLE_S
        return changes

    def due(self, scene: Scene) -> list[Question]:
        """Return the questions to ask the model about the scene of a frame.

        Call `questions.refuse` for each question that is not asked.
        """
        return self.questions.due(scene, self._held) if self.rule.asks else []

    def end(self) -> list[Change]:
        """End the open event, because the stream has ended or no frame has arrived for too long.

        Return the `end` change of the event, or an empty list if no event is open.
        """
        return self._stop(self._last_s)

    def _with_crossed(self, scene: Scene, held: dict[int, Moment]) -> dict[int, Moment]:
        """Return `held`, plus earlier line crossings that still wait for an answer of the model."""
        if self.rule.condition.kind != "crosses" or not self.rule.asks:
            return held
        self._crossed = {
            number: one
            for number, one in self._crossed.items()
            if number not in self._answered and self.questions.may_agree(number, number in scene.tracks)
        } | {number: (scene.tracks[number], at) for number, at in held.items()}
        return {number: at for number, (_, at) in self._crossed.items()}

    def _stop(self, seconds: float) -> list[Change]:
        if self.event is None:
            return []
        self.event = replace(self.event, end_time=_end_time(self.event), count=0)
        change = self._publish("end")
        self.event = self._published = None
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
        there = {track.number: track for track, _ in scene.empty.values()}
        there |= {number: track for number, (track, _) in self._crossed.items()} | dict(scene.tracks)
        tracks = [there[number] for number in held if number in there]
        seen = [track for track in tracks if scene.seen(track)]
        numbers = tuple(dict.fromkeys((*event.tracks, *(track.number for track in tracks))))[-_MOST_TRACKS:]
        zones = tuple(dict.fromkeys(zone for track in tracks for zone in track.zones))
        found: dict[str, Any] = {}
        if self.rule.asks:
            found["p_yes"] = self.questions.p_yes(list(held))
            found["answers"] = {**event.answers, **self.questions.answers(numbers)}
            known = {name: text for track in numbers for name, text in self.questions.attributes(track).items()}
            found["attributes"] = known or event.attributes
        # A track hidden at the begin of the event keeps its last score, and the event has no box.
        if shown := seen or (tracks if event.box is None else []):
            best = max(shown, key=lambda track: track.score)
            top = max(event.top_score, best.score)
            found |= {"label": best.label, "score": best.score, "top_score": top}
        if shown and (seen or self.rule.condition.kind == "removed"):
            found |= {"box": best.box, "speed": best.speed}
        if seen or not tracks:  # a hidden track may return or be gone; the event ends when a track was last seen
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
        assert self.event is not None
        self._published = self.event
        return Change(kind, self.event)


def _end_time(event: Event) -> float:
    """Return the end time of an event as Unix time. A jump of the system clock during the event is corrected."""
    lasted = event.frame_at - event.start_at
    if math.isfinite(lasted) and abs(event.frame_time - event.start_time - lasted) > _CLOCK_STEP_S:
        return event.start_time + lasted
    return max(event.start_time, event.frame_time)


def _soon_after(event: Event, scene: Scene) -> bool:
    """Return whether the last frame of a live stream's event is recent enough to continue the event."""
    return scene.capture_clock != "file" and abs(scene.captured_at - event.frame_time) <= RESUME_S
