"""What each output asks for, and where it ends."""

from __future__ import annotations

import pytest

from saccade.engine.models.protocol import Phase
from saccade.engine.tasks.objects import BoxesOutput, PointsOutput
from saccade.engine.tasks.text_output import TextOutput

EOS = 0


def test_objects_are_begun_placed_and_sized_in_turn() -> None:
    output = BoxesOutput(max_objects=2, conf=0.5, max_steps=100)
    assert [output.next_phase() for _ in range(7)] == [Phase.X_OR_EOS, Phase.Y, Phase.SIZE] * 2 + [None]
    assert not output.commit((1.0, 0.25, 0.0))
    assert not output.commit((0.5, 0.0, 0.0))
    assert not output.commit((0.1, 0.2, 0.0))
    assert output.commit((-0.1, 0.9, 0.0))
    assert [(one.x, one.y, one.width, one.height) for one in output.objects] == [(0.25, 0.5, 0.1, 0.2)]
    assert output.objects[0].score == pytest.approx(0.7311, abs=1e-4)


def test_an_answer_ends_where_the_context_does() -> None:
    assert BoxesOutput(50, 0.5, max_steps=8).steps == 6
    assert PointsOutput(50, 0.5, max_steps=8).steps == 8
    assert TextOutput(EOS, 50, max_steps=8).steps == 8


def test_text_ends_when_the_listener_has_heard_enough() -> None:
    heard: list[int] = []

    def enough(token: int) -> bool:
        heard.append(token)
        return token == 8

    output = TextOutput(EOS, 9, 100, on_token=enough)
    assert [output.commit((token, 0, 0)) for token in (7, 9, 8)] == [False, False, True]
    assert heard == output.tokens == [7, 9, 8]


def test_text_ends_at_the_end_token_or_the_last_one() -> None:
    output = TextOutput(EOS, 3, 100)
    assert [output.next_phase() for _ in range(4)] == [Phase.TOKEN, Phase.LATER_TOKEN, Phase.LATER_TOKEN, None]
    assert not output.commit((7, 0, 0))
    assert output.commit((EOS, 0, 0))
    assert output.tokens == [7]
