"""Asks a model the questions of rules about image crops. For live streams, frame processing does not wait for answers.

The number of unanswered questions is limited, and each question has a timeout.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from saccade.engine.core.admission import StreamSettings
from saccade.engine.errors import DeadlineError
from saccade.engine.results import Result, Text
from saccade.engine.tasks import Query
from saccade.pipeline.errors import reason_of
from saccade.pipeline.events.questions import FRAME, Answer, Question
from saccade.pipeline.events.scene import Scene

if TYPE_CHECKING:
    from saccade.engine import Engine

log = logging.getLogger(__name__)

MAX_ASKED = 4
"""Maximum number of questions of one stream in flight."""

_STREAM = "questions of rules"
_MARGIN = 0.1  # margin of a crop, as a fraction of the box's sides
_LEAST = 32  # smallest side of a crop, in pixels
_MAX_TOKENS = 24  # for an attribute in free text


class ModelAskEngine:
    """Answers questions with an engine that supports `Query` tasks.

    Args:
        engine: the engine. The caller closes it.
        weight: scheduling weight of all questions together. The default weight of a camera stream is 1.
    """

    def __init__(self, engine: Engine, weight: float = 4.0) -> None:
        self._engine = engine
        engine.configure_stream(_STREAM, StreamSettings(weight, newest=False))

    def ask(
        self, image: NDArray[np.uint8], text: str, choices: tuple[str, ...], deadline_s: float
    ) -> Future[tuple[str, Mapping[str, float]]]:
        """Submit a question about an image as a `Query` task, without waiting for the answer.

        Args:
            image: (height, width, 3) uint8 RGB. It must not change afterwards.
            text: the question.
            choices: the allowed answers; empty for free text.
            deadline_s: timeout in seconds. After the timeout, the question is cancelled and the future fails.

        Returns:
            A future of the answer and the probability of each choice.
        """
        task = Query(text, max_tokens=_MAX_TOKENS, choices=choices)
        asked = self._engine.submit(image, [task], deadline_s=deadline_s, stream=_STREAM)
        answered: Future[tuple[str, Mapping[str, float]]] = Future()

        def done(future: Future[Result]) -> None:
            if not answered.set_running_or_notify_cancel():  # the stream has ended in the meantime
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
    """Asks a model the questions of one stream's rules. Not thread-safe.

    Args:
        engine: answers the questions.
        deadline_s: timeout for an answer, in seconds.
        wait: True to wait for the answers before the next frame, for example for a video file. With False, an answer is
            used for the frames after its arrival.
    """

    def __init__(self, engine: ModelAskEngine, *, deadline_s: float = 2.0, wait: bool = False) -> None:
        self._engine = engine
        self._deadline_s = deadline_s
        self._wait = wait
        self._asked: list[_Asked] = []
        self._failing = ""

    def ask(self, question: Question, scene: Scene, image: NDArray[np.uint8]) -> bool:
        """Ask a question about a frame. Return False, without asking, if too many questions are unanswered.

        Args:
            question: the question.
            scene: tracks of the frame, with their boxes.
            image: (height, width, 3) uint8 RGB image of the frame.
        """
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
        """Return the answers that arrived since the last call. If the model failed to answer, `text` is None."""
        done = [one for one in self._asked if self._wait or one.future.done()]
        self._asked = [one for one in self._asked if one not in done]
        return [self._answer(one) for one in done]

    def close(self) -> None:
        """Cancel all unanswered questions."""
        for one in self._asked:
            one.future.cancel()
        self._asked = []

    def _answer(self, asked: _Asked) -> Answer:
        try:
            text, probabilities = asked.future.result(None if not self._wait else 60 * self._deadline_s)
        except (Exception, CancelledError) as error:
            reason = "the deadline has passed" if isinstance(error, DeadlineError) else reason_of(error)
            if reason != self._failing:
                log.warning("rule %s: the model failed to answer a question: %s", asked.question.rule, reason)
            self._failing = reason
            return Answer(asked.question, None)
        self._failing = ""
        return Answer(asked.question, text, probabilities)


def crop(image: NDArray[np.uint8], box: tuple[float, float, float, float]) -> NDArray[np.uint8]:
    """Return the crop of an image around a box, with a margin. The box is in normalized coordinates."""
    height, width = image.shape[:2]
    x1, y1, x2, y2 = box[0] * width, box[1] * height, box[2] * width, box[3] * height
    dx = max(_MARGIN * (x2 - x1), (_LEAST - (x2 - x1)) / 2)
    dy = max(_MARGIN * (y2 - y1), (_LEAST - (y2 - y1)) / 2)
    left, top = max(0, int(x1 - dx)), max(0, int(y1 - dy))
    return np.ascontiguousarray(image[top : max(top + 1, int(y2 + dy)), left : max(left + 1, int(x2 + dx))])
