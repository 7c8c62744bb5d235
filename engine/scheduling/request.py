"""One submitted picture on its way through the loop: windows and prompts in, one result out.

Knows results and tasks; knows nothing of devices or threads, except that it is finished in the loop's.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.engine.errors import PromptError
from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.moondream.prompts import Prompts
from saccade.engine.results import Box, Detections, Points, Result, Spot, Text, Timings
from saccade.engine.runtime.cpu_executor import Crops
from saccade.engine.scheduling.adapter_slots import Adapter
from saccade.engine.scheduling.detokenizer import Transcript
from saccade.engine.scheduling.found import Found
from saccade.engine.scheduling.output_state import (
    Choose,
    FindBoxes,
    FindObjects,
    FindPoints,
    Sampling,
    Skill,
    WriteText,
)
from saccade.engine.scheduling.scheduler import Answer, Look
from saccade.engine.scheduling.slicing import Window, distinct, merge, place, windows
from saccade.engine.tasks import Caption, Detect, Point, Query, Task


@dataclass(slots=True, frozen=True)
class _Part:
    """A look of the request: which window, and which of the request's tasks, by number, its answers are for."""

    window: Window
    tasks: tuple[int, ...]
    look: Look[Crops]


class Request:
    """A picture with its tasks.

    Args:
        image: (height, width, 3) uint8 RGB.
        tasks: what to ask.
        tiles: `Detect` tasks look at `tiles` × `tiles` windows as well.
        config: the model's.
        prompts: the model's.
        prepare: the executor's.
        n_together: most prompts on one look; more are asked in further looks.
        adapter: what all looks are answered with besides the model.
        deadline: `time.monotonic()` at which it fails with DeadlineError if it is not done.
        on_text: told each piece of its texts as it comes, in the loop's thread.

    Raises:
        PromptError: if a prompt leaves no room for an answer, or has words that are no tokens.
    """

    def __init__(
        self,
        image: NDArray[np.uint8],
        tasks: Sequence[Task],
        tiles: int,
        config: MoondreamConfig,
        prompts: Prompts,
        prepare: Callable[[NDArray[np.uint8]], Crops],
        n_together: int,
        *,
        adapter: Adapter | None = None,
        deadline: float = math.inf,
        on_text: Callable[[str], None] | None = None,
    ) -> None:
        self.future: Future[Result] = Future()
        self._began = time.monotonic()
        self._tasks = tuple(tasks)
        self._height, self._width = image.shape[:2]
        self._config, self._prompts = config, prompts
        self._on_text = on_text
        self._transcripts: dict[int, Transcript] = {}  # by the task's number
        self._choices: dict[int, dict[tuple[int, ...], str]] = {}  # what the ways to spell them mean, likewise
        self._parts: list[_Part] = []
        # A task of which nothing is wanted is not asked.
        everything = [i for i, task in enumerate(self._tasks) if _wanted(task)]
        boxes = [i for i in everything if isinstance(self._tasks[i], Detect)]
        for number, window in enumerate(windows(self._width, self._height, tiles if boxes else 1)):
            asked = boxes if number else everything
            view = image[window.y : window.y + window.height, window.x : window.x + window.width]
            crops = prepare(np.ascontiguousarray(view))
            for start in range(0, max(1, len(asked)), n_together):
                chosen = tuple(asked[start : start + n_together])
                look = Look(crops, [self._answer(i) for i in chosen], self._look_done, deadline, adapter)
                self._parts.append(_Part(window, chosen, look))
        self._left = len(self._parts)
        self._crops_ms = (time.monotonic() - self._began) * 1e3

    @property
    def looks(self) -> list[Look[Crops]]:
        """What the loop has to run."""
        return [part.look for part in self._parts]

    def _answer(self, number: int) -> Answer[Crops]:
        config, prompts, task = self._config, self._prompts, self._tasks[number]
        if isinstance(task, Detect | Point):
            ids = prompts.objects("detect" if isinstance(task, Detect) else "point", task.label)
        else:
            ids = prompts.query(task.question) if isinstance(task, Query) else prompts.caption(task.length)
        self._require_tokens(ids, task.label if isinstance(task, Detect | Point) else getattr(task, "question", ""))
        # The last thing sampled is never fed back, hence one step more than there are places.
        room = config.text.max_context - config.text.prefix_attn - len(ids) + 1
        skill: Skill
        if isinstance(task, Detect | Point):
            skill = (FindBoxes if isinstance(task, Detect) else FindPoints)(task.max_objects, task.conf, room)
        else:
            skill = self._words(number, task, room)
        if skill.steps < 1:
            most = config.text.max_context - config.text.prefix_attn
            raise PromptError(f"a prompt of {len(ids)} tokens is too long: {most} are left behind the picture")
        return Answer(tuple(ids), skill)

    def _words(self, number: int, task: Query | Caption, room: int) -> Skill:
        """The skill that answers in words, and where they will be found."""
        eos, prompts = self._config.tokenizer.eos_id, self._prompts
        seed = secrets.randbits(63) if task.seed is None else task.seed % (1 << 63)
        sampling = Sampling(task.temperature, task.top_p, seed)
        if isinstance(task, Query) and task.choices:
            spelled = {}
            for choice in task.choices:
                for words in (choice, f" {choice}"):  # whichever the model would rather say
                    ids = prompts.ids(words)
                    self._require_tokens(ids, choice)
                    if not ids or eos in ids:
                        raise PromptError(f"'{_short(choice)}' cannot be a choice: the model would end before or in it")
                    spelled[tuple(ids)] = choice
            self._choices[number] = spelled
            return Choose(eos, list(spelled), room, sampling)
        transcript = self._transcripts[number] = Transcript(prompts.text, task.stop, self._on_text)
        return WriteText(eos, task.max_tokens, room, sampling, transcript.add)

    def _require_tokens(self, ids: Sequence[int], words: str) -> None:
        # Checked here, since on a GPU an id past the table would take the whole device context down, not one request.
        if ids and max(ids) >= self._config.text.vocab_size:
            raise PromptError(f"the model has no token for a part of '{_short(words)}'")

    def _look_done(self, look: Look[Crops], error: BaseException | None) -> None:
        """Told by the loop, once for each look."""
        self._left -= 1
        if self.future.done() or (error is None and self._left):
            return
        try:
            outcome = error or self._result()
        except Exception as mistake:  # in a codec, or in who reads along; the loop goes on
            outcome = mistake
        if not self.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Result):
            self.future.set_result(outcome)
        else:
            self.future.set_exception(outcome)

    def _result(self) -> Result:
        found: list[list[Found]] = [[] for _ in self._tasks]
        words = [""] * len(self._tasks)
        for part in self._parts:
            for i, answer in zip(part.tasks, part.look.answers, strict=True):
                if isinstance(answer.skill, FindObjects):
                    placed = (place(one, part.window, self._width, self._height) for one in answer.skill.found)
                    found[i] += [one for one in placed if one is not None]
                elif isinstance(answer.skill, Choose):
                    words[i] = self._choices[i][tuple(answer.skill.tokens)]
                    if self._on_text is not None:
                        self._on_text(words[i])
                else:
                    self._transcripts[i].end()
                    words[i] = self._transcripts[i].text
        tiled = len({part.window for part in self._parts}) > 1
        boxes: list[Box] = []
        spots: list[Spot] = []
        texts: list[Text] = []
        for i, task in enumerate(self._tasks):
            if isinstance(task, Detect):
                group = merge(found[i])[: task.max_objects] if tiled else distinct(found[i])
                boxes += [_box(task.label, one) for one in group]
            elif isinstance(task, Point):
                spots += [Spot(task.label, one.score, one.x, one.y) for one in found[i]]
            else:
                asked = task.question if isinstance(task, Query) else f"caption: {task.length}"
                texts.append(Text(asked, words[i]))
        return Result(
            Detections(tuple(boxes), self._width, self._height),
            Points(tuple(spots), self._width, self._height),
            tuple(texts),
            self._timings(),
        )

    def _timings(self) -> Timings:
        """Cropping and the first look's prefill; the wait between them; and all that came after."""
        first = self._parts[0].look
        if not first.launched_at:  # nothing was asked
            return Timings(queue_ms=(time.monotonic() - self._began) * 1e3)
        prefill_ms = (first.prefilled_at - first.launched_at) * 1e3
        return Timings(
            queue_ms=(first.launched_at - self._began) * 1e3 - self._crops_ms,
            prefill_ms=self._crops_ms + prefill_ms,
            decode_ms=(time.monotonic() - first.prefilled_at) * 1e3,
        )


def _wanted(task: Task) -> bool:
    if isinstance(task, Detect | Point):
        return task.max_objects > 0
    return task.max_tokens > 0 or (isinstance(task, Query) and bool(task.choices))


def _short(words: str) -> str:
    return words if len(words) <= 40 else words[:39] + "…"


def _box(label: str, found: Found) -> Box:
    def clip(value: float) -> float:
        return min(1.0, max(0.0, value))

    half_w, half_h = found.width / 2, found.height / 2
    return Box(
        label,
        found.score,
        clip(found.x - half_w),
        clip(found.y - half_h),
        clip(found.x + half_w),
        clip(found.y + half_h),
    )
