"""Answers in words: probabilities of choices, and reasoning, whose steps are known once the one ahead is read."""

from __future__ import annotations

import math
from collections import deque
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.models.protocol import Phase, ReasoningTokens
from saccade.engine.results import Grounding, Reasoning
from saccade.engine.tasks.task import MAX_SCORED, OutputState, Sampled, Sampling, TokenRule
from saccade.engine.tasks.text_output import ChoiceOutput, ReasoningOutput, TextOutput

EOS, ANSWER, COORD, GROUND = 0, 3, 5, 7
TOKENS = ReasoningTokens(ANSWER, (ANSWER,), (EOS, 6), COORD, frozenset({GROUND, 9}))


def chance(path: tuple[int, ...], token: int) -> float:
    """The probability of a token behind others, of a model that is arithmetic: those of tokens 1 to 5 make 1."""
    weights = {one: 1 + (one * 31 + sum(path) * 17 + len(path)) % 23 for one in range(1, 6)}
    return weights[token] / sum(weights.values())


def decide(options: dict[tuple[int, ...], str], branches: int = 0, **more: object) -> ChoiceOutput:
    """Run an output over the arithmetic model, with at most so many branches."""
    output = ChoiceOutput(options, 9, **more)  # type: ignore[arg-type]
    for path, one in [((), output), *output.branches(branches)]:
        walk(one, path)
    output.finish()
    return output


def walk(output: OutputState, path: tuple[int, ...]) -> None:
    """Run one part of it: what is fed lies at a position, and what is behind that is forgotten."""
    fed, token, certain = list(path), -1, [int(value[1]) for value in output.certain]
    for number in range(output.steps):
        assert output.next_phase() is (Phase.LATER_TOKEN if number or path else Phase.TOKEN)
        if number:
            assert number > len(certain) or token == certain[number - 1]
            del fed[len(fed) - output.back :]
            fed.append(token)
        assert len(fed) - len(path) <= output.positions
        rule = output.rule()
        assert rule.allowed is not None
        (token,) = rule.allowed
        scores = [math.log(chance(tuple(fed), one)) for one in rule.scored]
        assert output.commit((float(token), 0.0, 0.0, *scores)) == (number == output.steps - 1)
    assert output.next_phase() is None


paths = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(paths, st.sampled_from("abc"), min_size=1, max_size=8))
def test_a_choice_has_the_mass_of_the_answers_that_are_it(options: dict[tuple[int, ...], str]) -> None:
    wanted = dict.fromkeys(options.values(), 0.0)
    for answer in product(
        range(1, 6), repeat=4
    ):  # every answer of four tokens goes to the longest option it begins with
        option = next((answer[:n] for n in range(4, 0, -1) if answer[:n] in options), None)
        if option is not None:
            mass = math.prod(chance(answer[:n], token) for n, token in enumerate(answer))
            wanted[options[option]] += mass
    total = sum(wanted.values())
    for output in (decide(options), decide(options, branches=30)):
        assert list(output.probabilities) == list(wanted)
        for choice, mass in wanted.items():
            assert output.probabilities[choice] == pytest.approx(mass / total, abs=1e-9)
        assert output.probabilities[output.choice] == max(output.probabilities.values())


def test_choices_of_one_token_take_the_prompt_s_step_alone() -> None:
    output = ChoiceOutput({(1,): "a", (2,): "b", (4,): "a"}, 9)
    assert (output.steps, output.positions) == (1, 0)
    assert set(output.rule().scored) == {1, 2, 4}


def test_a_choice_is_drawn_by_its_probability() -> None:
    options = {(1,): "a", (2, 3): "b", (2, 4): "c"}
    p = decide(options).probabilities
    drawn = [decide(options, sampling=Sampling(1.0, 1.0, seed)).choice for seed in range(2000)]
    for choice in "abc":
        assert drawn.count(choice) / 2000 == pytest.approx(p[choice], abs=0.05)
    likeliest = max(p, key=lambda choice: p[choice])
    assert {decide(options, sampling=Sampling(1.0, 1e-6, seed)).choice for seed in range(20)} == {likeliest}
    assert {decide(options, sampling=Sampling(1e-3, 1.0, seed)).choice for seed in range(20)} == {likeliest}


def test_scores_that_are_no_numbers_still_make_a_choice() -> None:
    output = ChoiceOutput({(1,): "a", (2,): "b"}, 9)
    output.commit((1.0, 0.0, 0.0, math.nan, -math.inf))
    output.finish()
    assert output.probabilities == {"a": 0.5, "b": 0.5}


def test_choices_without_room_and_too_many_of_them_are_refused() -> None:
    assert ChoiceOutput({(1, 2): "a", (3,): "b"}, 1).steps == 0
    with pytest.raises(ValueError, match="at most"):
        ChoiceOutput({(token,): "x" for token in range(MAX_SCORED + 1)}, 9)


# Reasoning


def reason(output: ReasoningOutput, script: list[Sampled], depth: int) -> list[tuple[Phase, TokenRule]]:
    """Run an output as the step loop does; a forced token is sampled, else what the script says."""
    seen: list[tuple[Phase, TokenRule]] = []
    flying: deque[Sampled] = deque()
    scripted = deque(script)
    for _ in range(99):
        if depth == 1 and flying and output.commit(flying.popleft()):
            break
        phase = output.next_phase()
        if depth == 2 and flying and output.commit(flying.popleft()):
            break
        if phase is not None:
            rule = output.rule()
            seen.append((phase, rule))
            values = scripted.popleft()
            flying.append((float(rule.allowed[0]), 0.0, 0.0) if rule.allowed else values)
    else:
        pytest.fail("it does not end")
    output.finish()
    return seen


def text(max_tokens: int) -> TextOutput:
    return TextOutput(EOS, max_tokens, 99)


REST = [(8.0, 0.0, 0.0)] * 30
THOUGHT: list[Sampled] = [(11, 0.0, 0.0), (GROUND, 0.0, 0.0), (COORD, 0.25, 0.0), (COORD, 0.5, 0.0)]


@pytest.mark.parametrize("depth", [1, 2])
def test_reasoning_goes_over_into_the_answer(depth: int) -> None:
    output = ReasoningOutput(text(3), TOKENS, 9, lambda ids: "".join(f"<{token}>" for token in ids))
    ends: Sampled = (ANSWER, 0.0, 0.0)
    seen = reason(output, [*THOUGHT, (COORD, 0.75, 0.0), ends, (COORD, 0.1, 0.0), *REST], depth)
    rules = [rule for _, rule in seen]
    assert rules[0] == TokenRule(grounded=True)
    assert rules[1:6] == [TokenRule(forbidden=(EOS, 6), grounded=True)] * 5
    assert rules[6:] == [TokenRule()] * len(rules[6:])
    assert [phase for phase, _ in seen[:6]] == [Phase.REASONING] * 6
    assert [phase for phase, _ in seen[7:9]] == [Phase.LATER_TOKEN] * 2
    assert isinstance(output.answer, TextOutput)
    assert output.answer.tokens == [COORD, 8, 8]
    thought = "<11><7><5><5><5>"
    assert output.reasoning == Reasoning(thought, (Grounding(4, len(thought), ((0.25, 0.5),)),))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("suffix", [(ANSWER,), (ANSWER, 12), (ANSWER, 12, 13)])
def test_reasoning_is_cut_and_the_suffix_is_fed(depth: int, suffix: tuple[int, ...]) -> None:
    tokens = ReasoningTokens(ANSWER, suffix, (EOS,), COORD, frozenset({GROUND}))
    output = ReasoningOutput(text(4), tokens, 2, str)
    seen = reason(output, [(11.0, 0.0, 0.0), (12.0, 0.0, 0.0), *REST], depth)
    assert [rule.allowed for _, rule in seen[2 : 2 + len(suffix)]] == [(token,) for token in suffix]
    assert output.reasoning.text == "[11, 12]"
    assert isinstance(output.answer, TextOutput)
    assert output.answer.tokens == [8, 8, 8, 8]
    assert output.positions == 2 + len(suffix) + 3
    assert len(seen) <= output.steps


@pytest.mark.parametrize("depth", [1, 2])
def test_choices_behind_a_reasoning_get_their_probabilities(depth: int) -> None:
    options = {(1,): "a", (2, 3): "b"}
    output = ReasoningOutput(ChoiceOutput(options, 9), TOKENS, 1, str)
    scored: list[Sampled] = [(1.0, 0.0, 0.0, math.log(0.5), math.log(0.25)), (3.0, 0.0, 0.0, math.log(0.5))]

    class Scores(ChoiceOutput):
        """Takes the script's scores, whatever was forced."""

        def commit(self, sampled: Sampled) -> bool:
            return super().commit(scored.pop(0))

    output.answer = Scores(options, 9)
    reason(output, [(11.0, 0.0, 0.0), *REST], depth)
    assert isinstance(output.answer, ChoiceOutput)
    assert output.answer.probabilities == pytest.approx({"a": 0.8, "b": 0.2})


def test_without_room_for_an_answer_nothing_is_begun() -> None:
    outputs: list[OutputState] = [ReasoningOutput(TextOutput(EOS, 5, 0), TOKENS, 3, str)]
    outputs.append(ReasoningOutput(ChoiceOutput({(1, 2): "a"}, 1), TOKENS, 3, str))
    assert [output.steps for output in outputs] == [0, 0]
