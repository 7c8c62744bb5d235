"""What each skill asks for, and where it ends."""

from __future__ import annotations

import pytest

from saccade.engine.scheduling.output_state import Choose, FindBoxes, FindPoints, Phase, WriteText

EOS = 0


def test_objects_are_begun_placed_and_sized_in_turn() -> None:
    skill = FindBoxes(max_objects=2, conf=0.5, max_steps=100)
    assert [skill.next_phase() for _ in range(7)] == [Phase.BEGIN, Phase.Y, Phase.SIZE] * 2 + [None]
    assert not skill.commit((1.0, 0.25, 0.0))
    assert not skill.commit((0.5, 0.0, 0.0))
    assert not skill.commit((0.1, 0.2, 0.0))
    assert skill.commit((-0.1, 0.9, 0.0))
    assert [(one.x, one.y, one.width, one.height) for one in skill.found] == [(0.25, 0.5, 0.1, 0.2)]
    assert skill.found[0].score == pytest.approx(0.7311, abs=1e-4)


def test_an_answer_ends_where_the_context_does() -> None:
    assert FindBoxes(50, 0.5, max_steps=8).steps == 6
    assert FindPoints(50, 0.5, max_steps=8).steps == 8
    assert WriteText(EOS, 50, max_steps=8).steps == 8


def test_a_choice_is_made_where_only_one_is_left() -> None:
    options = [(7,), (7, 8), (9, 5, 5), (9, 6)]
    for tokens, seen in (
        ([7, EOS], [{7, 9}, {EOS, 8}]),
        ([7, 8], [{7, 9}, {EOS, 8}]),
        ([9, 5, 5], [{7, 9}, {5, 6}, {5}]),
    ):
        skill = Choose(EOS, options, 3)
        assert skill.steps == 3
        for n, token in enumerate(tokens, 1):
            assert set(skill.allowed()) == seen[n - 1]
            assert skill.commit((token, 0, 0)) == (n == len(tokens))
        assert skill.tokens == [token for token in tokens if token != EOS]
    assert Choose(EOS, options, 2).steps == 0


def test_text_ends_when_the_listener_has_heard_enough() -> None:
    heard: list[int] = []

    def enough(token: int) -> bool:
        heard.append(token)
        return token == 8

    skill = WriteText(EOS, 9, 100, enough=enough)
    assert [skill.commit((token, 0, 0)) for token in (7, 9, 8)] == [False, False, True]
    assert heard == skill.tokens == [7, 9, 8]


def test_text_ends_at_the_end_token_or_the_last_one() -> None:
    skill = WriteText(EOS, 3, 100)
    assert [skill.next_phase() for _ in range(4)] == [Phase.TOKEN] * 3 + [None]
    assert not skill.commit((7, 0, 0))
    assert skill.commit((EOS, 0, 0))
    assert skill.tokens == [7]
