"""Asks a model the questions of rules, about crops of frames, without making a frame wait.

A few questions are under way at a time, each with a deadline; what is too late counts as no answer. Knows
engines by one method (`AskEngine`), questions and images; not what answers mean.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from saccade.engine.core.admission import StreamSettings
from saccade.engine.errors import DeadlineError
from saccade.engine.results import Result, Text
from saccade.engine.tasks import Query
from saccade.pipeline.events.questions import FRAME, Answer, Question
from saccade.pipeline.events.scene import Scene

if TYPE_CHECKING:
    from saccade.engine import Engine

log = logging.getLogger(__name__)

MAX_ASKED = 4
"""Questions of one stream that are under way at a time."""

_STREAM = "questions of rules"
_MARGIN = 0.1  # of a box's sides, that a crop shows around it
_LEAST = 32  # pixels, the shorter side of a crop
_MAX_TOKENS = 24  # of an attribute in free text


class AskEngine(Protocol):
    """What answers questions."""

    def ask(
        self, image: NDArray[np.uint8], text: str, choices: tuple[str, ...], deadline_s: float
    ) -> Future[tuple[str, Mapping[str, float]]]:
        """Queue a question and return at once.

        Args:
            image: (height, width, 3) uint8 RGB, which does not change.
            text: the question.
            choices: one of which is the answer; empty for free text.
            deadline_s: after so many seconds the work is dropped, and the future fails.

        Returns:
            The answer, and the probability of each choice.
        """
        ...


class ModelAskEngine:
    """A model that answers `Query` tasks.

    The questions of all streams share the engine with frames as one stream of it, in which nothing is replaced.

    Args:
        engine: which stays the caller's.
        weight: the share of all questions; that of a camera's frames is 1 unless it is set.
    """

    def __init__(self, engine: Engine, weight: float = 4.0) -> None:
        self._engine = engine
        engine.configure_stream(_STREAM, StreamSettings(weight, newest=False))

    def ask(
        self, image: NDArray[np.uint8], text: str, choices: tuple[str, ...], deadline_s: float
    ) -> Future[tuple[str, Mapping[str, float]]]:
        """As `AskEngine.ask`."""
        task = Query(text, max_tokens=_MAX_TOKENS, choices=choices)
        asked = self._engine.submit(image, [task], deadline_s=deadline_s, stream=_STREAM)
        answered: Future[tuple[str, Mapping[str, float]]] = Future()

        def done(future: Future[Result]) -> None:
            if not answered.set_running_or_notify_cancel():  # the stream has ended meanwhile
                return
            try:
                part: Text = future.result().texts[0]
                answered.set_result((part.text.strip(), part.probabilities or {}))
            except (Exception, CancelledError) as error:
                answered.set_exception(error if isinstance(error, Exception) else DeadlineError("dropped"))

        answered.add_done_callback(lambda future: asked.cancel() if future.cancelled() else None)
        asked.add_done_callback(done)
        return answered


@dataclass(slots=True, frozen=True)
class _Asked:
    question: Question
    future: Future[tuple[str, Mapping[str, float]]]


class Asker:
    """The questions of one stream that are under way. For one thread.

    Args:
        engine: answers.
        deadline_s: how long an answer may take.
        wait: wait for answers, as where the frames of a file can; else take them with a later frame.
    """

    def __init__(self, engine: AskEngine, *, deadline_s: float = 2.0, wait: bool = False) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self._wait = wait
        self._asked: list[_Asked] = []
        self._failing = ""

    def ask(self, question: Question, scene: Scene, image: NDArray[np.uint8]) -> bool:
        """Ask about the frame of a scene; False if too many questions are under way."""
        if len(self._asked) >= MAX_ASKED and not self._wait:
            return False
        track = None if question.track == FRAME else scene.tracks[question.track]
        shown = image if track is None else crop(image, track.box)
        try:
            future = self._engine.ask(shown, question.text, question.choices, self._deadline_s)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        self._asked.append(_Asked(question, future))
        return True

    def answers(self) -> list[Answer]:
        """What has been answered, or will not be, since the last call."""
        done = [one for one in self._asked if self._wait or one.future.done()]
        self._asked = [one for one in self._asked if one not in done]
        return [self._answer(one) for one in done]

    def close(self) -> None:
        """Give up what is under way."""
        for one in self._asked:
            one.future.cancel()
        self._asked = []

    def _answer(self, asked: _Asked) -> Answer:
        try:
            text, probabilities = asked.future.result(None if not self._wait else 60 * self._deadline_s)
        except (Exception, CancelledError) as error:
            reason = "too late" if isinstance(error, DeadlineError) else str(error) or type(error).__name__
            if reason != self._failing:
                log.warning("rule %s: a question was not answered: %s", asked.question.rule, reason)
            self._failing = reason
            return Answer(asked.question, None)
        self._failing = ""
        return Answer(asked.question, text, probabilities)


def crop(image: NDArray[np.uint8], box: tuple[float, float, float, float]) -> NDArray[np.uint8]:
    """What an image shows in a box (fractions) and a little around it, as an image of its own."""
    height, width = image.shape[:2]
    x1, y1, x2, y2 = box[0] * width, box[1] * height, box[2] * width, box[3] * height
    dx = max(_MARGIN * (x2 - x1), (_LEAST - (x2 - x1)) / 2)
    dy = max(_MARGIN * (y2 - y1), (_LEAST - (y2 - y1)) / 2)
    left, top = max(0, int(x1 - dx)), max(0, int(y1 - dy))
    return np.ascontiguousarray(image[top : max(top + 1, int(y2 + dy)), left : max(left + 1, int(x2 + dx))])
