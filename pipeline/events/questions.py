"""Decides which questions of a rule to ask the model about tracks, and evaluates the answers.

It stores the answers for each track, and applies two thresholds (hysteresis) to the probabilities.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from saccade.pipeline.events.scene import Scene, Track
from saccade.pipeline.events.settings import RuleSettings

FRAME = -1
"""Used instead of a track ID for a question about the whole frame."""

YES, NO = "yes", "no"
GROWN = 1.5
"""Growth of the area of a track's box after which a question is repeated, if its answer could change."""

_SHARPER = 1.3
_VERIFIED = 0.5  # lowest p(yes) that passes a verification
_RETRY_S = 2.0  # wait after a failed question

_Since = TypeVar("_Since")

Kind = Literal["verify", "ask", "attribute"]


@dataclass(slots=True, frozen=True)
class Question:
    """A question to the model about a track or the whole frame.

    Attributes:
        rule: name of the rule.
        kind: purpose of the question. `verify` confirms a track, `ask` is the rule's repeated question, and `attribute`
            asks for an attribute of a track.
        name: name of the attribute; empty for `verify` and `ask`.
        track: track ID, or `FRAME` for the whole frame.
        text: text of the question.
        choices: the allowed answers; empty for free text.
    """

    rule: str
    kind: Kind
    name: str
    track: int
    text: str
    choices: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class Answer:
    """The answer of a model to a question.

    Attributes:
        question: the question.
        text: text of the answer; None if the question failed or timed out.
        probabilities: probability of each choice; empty for free text.
    """

    question: Question
    text: str | None
    probabilities: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    """The state of one question about one track: the last answer, and when the question was asked."""

    pending: bool = False
    asked_s: float = float("-inf")
    area: float = 0.0
    sharpness: float = 0.0
    failed: bool = False
    text: str | None = None
    p_yes: float | None = None
    on: bool = False


class Questions:
    """Stores the questions of one rule in one stream, with the model's answers.

    Args:
        rule: settings of the rule.
    """

    def __init__(self, rule: RuleSettings) -> None:
        self._rule = rule
        self._states: dict[tuple[Kind, str, int], _State] = {}

    def due(self, scene: Scene, candidates: Collection[int]) -> list[Question]:
        """Return the questions to ask now about tracks that fulfil the condition, and mark the questions as asked."""
        rule, questions = self._rule, list[Question]()
        self._forget(scene, candidates)
        tracks = [number for number in candidates if number != FRAME] or ([FRAME] if candidates else [])
        for number in tracks:
            track = scene.tracks.get(number)
            if number != FRAME and (track is None or not scene.seen(track)):
                continue  # the track is not visible on this frame
            if rule.verify and self._wants(scene, "verify", "", number, track):
                questions.append(Question(rule.name, "verify", "", number, rule.verify, (YES, NO)))
            if not self._verified(number):
                continue
            for name, attribute in rule.attributes.items() if number != FRAME else ():
                if self._wants(scene, "attribute", name, number, track):
                    choices = tuple(attribute.choices)
                    questions.append(Question(rule.name, "attribute", name, number, attribute.question, choices))
            if rule.ask and rule.scope == "track" and self._wants(scene, "ask", "", number, track):
                questions.append(Question(rule.name, "ask", "", number, rule.ask, (YES, NO)))
        whole = rule.ask and rule.scope == "frame" and any(map(self._verified, tracks))
        if rule.ask and whole and self._wants(scene, "ask", "", FRAME, None):
            questions.append(Question(rule.name, "ask", "", FRAME, rule.ask, (YES, NO)))
        return questions

    def take(self, answer: Answer) -> None:
        """Store the model's answer to a question. An answer about an ended track is ignored."""
        question = answer.question
        state = self._states.get((question.kind, question.name, question.track))
        if state is None:
            return
        state.pending, state.failed = False, answer.text is None
        if answer.text is None:
            return
        state.text = answer.text
        if question.kind == "attribute":
            return
        p_yes = answer.probabilities.get(YES, 1.0 if answer.text == YES else 0.0)
        state.p_yes = p_yes
        p = p_yes if self._rule.expect == YES else 1 - p_yes
        if question.kind == "verify":
            state.on = state.on or p_yes >= _VERIFIED
        elif p >= self._rule.threshold.on:
            state.on = True
        elif p <= self._rule.threshold.off:
            state.on = False

    def refuse(self, question: Question) -> None:
        """Mark a question as not asked. The question is due again on the next frame."""
        state = self._states.get((question.kind, question.name, question.track))
        if state is not None:
            state.pending, state.asked_s = False, float("-inf")

    def agreed(self, held: Mapping[int, _Since]) -> dict[int, _Since]:
        """Return the tracks for which all answers of the model match the rule.

        Args:
            held: the tracks that fulfil the condition of the rule.
        """
        rule = self._rule
        if not (rule.ask or rule.verify):
            return dict(held)
        subjects = [number for number in held if number != FRAME] or list(held)
        if rule.ask and rule.scope == "frame":
            subjects = subjects if self._state("ask", "", FRAME).on else []
        elif rule.ask:
            subjects = [number for number in subjects if self._state("ask", "", number).on]
        kept = {number: held[number] for number in subjects if self._verified(number)}
        return {**kept, FRAME: held[FRAME]} if kept and FRAME in held else kept

    def may_agree(self, track: int, there: bool) -> bool:
        """Return whether a track can still fulfil the rule, given the model's answers so far.

        Args:
            track: track ID.
            there: whether the track is on the current frame. If False, no new question about the track can be asked.
        """
        verified, asked = self._state("verify", "", track), self._state("ask", "", self._subject(track))
        if not self._verified(track):
            return there or verified.pending
        if asked.on or asked.pending or not self._rule.ask:
            return True
        return there and (asked.text is None or asked.failed)

    def lacks(self, track: int, there: bool) -> bool:
        """Return whether an attribute of a track is unknown and the model can still provide it.

        Args:
            track: track ID.
            there: whether the track is on the current frame. If False, no new question about the track can be asked.
        """
        states = [self._state("attribute", name, track) for name in self._rule.attributes]
        return any(state.pending or (there and state.text is None and not state.failed) for state in states)

    def p_yes(self, tracks: Collection[int]) -> float | None:
        """Return the model's probability of "yes" to the rule's question, or None without an answer.

        If there are several tracks, the answer closest to the answer that the rule expects is used.
        """
        numbers = [FRAME] if self._rule.scope == "frame" or not tracks else tracks
        known = [p for number in numbers if (p := self._state("ask", "", number).p_yes) is not None]
        if not known:
            return None
        return max(known) if self._rule.expect == YES else min(known)

    def answers(self, tracks: Collection[int]) -> dict[str, str]:
        """Return the newest answers about the given tracks or the whole frame, by question text."""
        found = {}
        for kind, text in (("verify", self._rule.verify), ("ask", self._rule.ask)):
            for number in (FRAME, *tracks):
                state = self._states.get((kind, "", number))  # type: ignore[arg-type]
                if text and state is not None and state.text is not None:
                    found[text] = state.text
        return found

    def attributes(self, track: int) -> dict[str, str]:
        """Return the known attributes of a track: the model's answers, by attribute name."""
        states = {name: self._states.get(("attribute", name, track)) for name in self._rule.attributes}
        return {name: state.text for name, state in states.items() if state is not None and state.text is not None}

    def _wants(self, scene: Scene, kind: Kind, name: str, number: int, track: Track | None) -> bool:
        state = self._states.setdefault((kind, name, number), _State())
        if state.pending or (state.failed and scene.seconds - state.asked_s < _RETRY_S):
            return False
        area = 0.0 if track is None else track.area
        sharpness = 0.0
        if state.asked_s != float("-inf") and not state.failed:
            grown = track is not None and area >= GROWN * state.area
            if kind == "ask" or track is None:
                wanted = not (kind == "verify" and state.on) and scene.seconds - state.asked_s >= self._rule.again
            elif kind == "attribute":
                wanted = grown
            else:
                sharpness = scene.sharpness(track)
                wanted = not state.on and (grown or sharpness >= _SHARPER * state.sharpness)
            if not wanted:
                return False
        if kind == "verify" and track is not None and not sharpness:
            sharpness = scene.sharpness(track)
        state.pending, state.asked_s, state.area, state.sharpness = True, scene.seconds, area, sharpness
        return True

    def _verified(self, number: int) -> bool:
        return not self._rule.verify or self._state("verify", "", number).on

    def _state(self, kind: Kind, name: str, number: int) -> _State:
        return self._states.get((kind, name, number)) or _State()

    def _subject(self, track: int) -> int:
        return FRAME if self._rule.scope == "frame" else track

    def _forget(self, scene: Scene, candidates: Collection[int]) -> None:
        wanted = {*candidates, FRAME} if candidates else set()
        for key, state in list(self._states.items()):
            kind, _, number = key
            gone = number != FRAME and number not in scene.tracks
            stale = kind == "ask" and scene.seconds - state.asked_s >= self._rule.again
            if number not in wanted and (gone or stale):
                del self._states[key]
