"""The state machines of answers in words: free text, a choice with its probabilities, and reasoning before an answer.

No torch, no tokenizer: what tokens stand for is known to those who made them.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from saccade.engine.models.protocol import Phase
from saccade.engine.results import Grounding, Reasoning
from saccade.engine.tasks.output_state import (
    GREEDY,
    MAX_SCORED,
    FedValue,
    OutputState,
    Sampled,
    Sampling,
    TokenRule,
)

if TYPE_CHECKING:
    from saccade.engine.models.protocol import ReasoningTokens


class TextOutput(OutputState):
    """Answers of query and caption: tokens until the end token, `max_tokens`, or a stop string.

    Args:
        eos: the end token.
        max_tokens: most tokens wanted.
        max_steps: most steps that the context has room for.
        sampling: how tokens are sampled.
        on_token: called with each token but the end; True ends the answer with it.
        on_finish: called when the answer is complete.
    """

    __slots__ = ("_eos", "_on_finish", "_on_token", "tokens")
    phases = (Phase.TOKEN,)

    def __init__(
        self,
        eos: int,
        max_tokens: int,
        max_steps: int,
        sampling: Sampling = GREEDY,
        on_token: Callable[[int], bool] | None = None,
        on_finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(min(max_tokens, max_steps), sampling)
        self._eos, self._on_token, self._on_finish = eos, on_token, on_finish
        self.tokens: list[int] = []

    def next_phase(self) -> Phase | None:
        """TOKEN for the first, LATER_TOKEN from then on."""
        first = not self._launched
        phase = super().next_phase()
        return phase if phase is None or first else Phase.LATER_TOKEN

    @property
    def draftable(self) -> bool:
        """Unless it is drawn, and so is meant to differ each time."""
        return self.sampling.temperature == 0

    def fed(self, phase: Phase, sampled: Sampled) -> FedValue | None:
        """A token; None at the end of the text."""
        return None if int(sampled[0]) == self._eos else (Phase.TOKEN, sampled[0], 0.0)

    def values(self) -> list[FedValue]:
        """Its tokens."""
        return [(Phase.TOKEN, float(token), 0.0) for token in self.tokens]

    def commit(self, sampled: Sampled) -> bool:
        """Take a token; True at the end of the text."""
        token = int(sampled[0])
        if token == self._eos:
            return True
        self.tokens.append(token)
        return (self._on_token is not None and self._on_token(token)) or len(self.tokens) == self.steps

    def finish(self) -> None:
        """Let `on_finish` release what was held back."""
        if self._on_finish is not None:
            self._on_finish()


class _TreeWalk(OutputState):
    """Scores some inner nodes of a tree of options, one each step, in depth-first order.

    Args:
        nodes: the path of the first is fed already.
        sampling: how tokens are sampled.
    """

    __slots__ = ("_committed", "_nodes", "_ruled")
    phases = (Phase.TOKEN,)

    def __init__(self, nodes: Sequence[_Inner], sampling: Sampling) -> None:
        super().__init__(len(nodes), sampling)
        self._nodes = nodes
        self._committed = self._ruled = 0

    @property
    def positions(self) -> int:
        """The depth of the nodes below the first."""
        return max(len(node.path) for node in self._nodes) - len(self._nodes[0].path) if self.steps else 0

    @property
    def certain(self) -> Sequence[FedValue]:
        """The tokens that lead from the first node to those right below one another."""
        return [(Phase.TOKEN, float(node.path[-1]), 0.0) for node in _chains(self._nodes)[0][1:]]

    def next_phase(self) -> Phase | None:
        """TOKEN for the root, LATER_TOKEN for all others."""
        number = self._launched
        phase = super().next_phase()
        if phase is None or not self._nodes[number].path:
            return phase
        if number:
            self.back = len(self._nodes[number - 1].path) + 1 - len(self._nodes[number].path)
        return Phase.LATER_TOKEN

    def rule(self) -> TokenRule:
        """Scores of the node's children; what is sampled leads to the next node."""
        node, self._ruled = self._nodes[self._ruled], self._ruled + 1
        following = self._nodes[self._ruled].path[-1] if self._ruled < len(self._nodes) else next(iter(node.children))
        return TokenRule(allowed=(following,), scored=tuple(node.children))

    def commit(self, sampled: Sampled) -> bool:
        """Take the scores of a node's children; True after the last node."""
        node = self._nodes[self._committed]
        self._committed += 1
        for token, score in zip(node.children, sampled[3:], strict=True):
            node.children[token] = -math.inf if math.isnan(score) else score
        return self._committed == self.steps


class ChoiceOutput(_TreeWalk):
    """Answers of query with choices: the probability of each, and the likeliest or one drawn by them.

    The probability of an option is the product of its tokens', each behind those before it: that an answer drawn from
    the model begins with the option. Where another choice's option continues it, the answers that begin with that one
    are taken off. A choice has the sum of its options, and the probabilities of all choices are scaled to 1.

    The options are a tree of tokens. Each step feeds one inner node, in depth-first order, and yields the log
    probabilities of its children; a branch that is done is overwritten by the next, see `back`. So where the options
    begin with tokens of their own, and are one token long, the step that reads the prompt answers alone. With branches
    it does so whatever the options are: of yes and no in letters, a tree of 14 inner nodes, there are 8.

    Args:
        options: what each token sequence stands for; none is empty.
        max_steps: most steps that the context has room for; if the longest option needs more, `steps` is 0.
        sampling: with a temperature T a choice is drawn by its probability to the power 1 / T, from the fewest
            likeliest that reach `top_p`.
        on_finish: called with the choice when the answer is complete.

    Attributes:
        probabilities: of each choice, in the order of the options; set by `finish`.
        choice: the answer; likewise.
        n_tokens: of the likeliest option that stands for it; likewise.

    Raises:
        ValueError: if more than `MAX_SCORED` tokens can follow one another's beginning.
    """

    __slots__ = ("_on_finish", "_options", "_tree", "choice", "n_tokens", "probabilities")

    def __init__(
        self,
        options: Mapping[tuple[int, ...], str],
        max_steps: int,
        sampling: Sampling = GREEDY,
        on_finish: Callable[[str], None] | None = None,
    ) -> None:
        self._options, self._on_finish = options, on_finish
        self._tree = _inner_nodes(options)
        if any(len(node.children) > MAX_SCORED for node in self._tree):
            raise ValueError(f"at most {MAX_SCORED} choices can begin alike")
        super().__init__(self._tree, sampling)
        if max(map(len, options)) > max_steps:
            self.steps = 0
        self.probabilities: dict[str, float] = {}
        self.choice, self.n_tokens = "", 0

    def branches(self, most: int) -> Sequence[tuple[tuple[int, ...], OutputState]]:
        """The nodes that the tokens of the first option do not lead to, each chain of them behind its own tokens."""
        own, *others = _chains(self._tree)
        if len(others) > most:
            return ()
        self._nodes, self.steps = own, len(own)
        return [(chain[0].path, _TreeWalk(chain, self.sampling)) for chain in others]

    def vocabulary(self) -> Iterable[int]:
        """The tokens of all options."""
        return {token for option in self._options for token in option}

    def finish(self) -> None:
        """Make probabilities of the scores, decide, and report the choice."""
        scores = {(*node.path, token): score for node in self._tree for token, score in node.children.items()}
        logs: dict[tuple[int, ...], float] = {}
        for path in sorted(scores, key=len):
            logs[path] = logs.get(path[:-1], 0.0) + scores[path]
        best = max(logs[option] for option in self._options)
        mass = dict.fromkeys(self._options.values(), 0.0)
        for option, choice in self._options.items():
            p = math.exp(logs[option] - best) if best > -math.inf else 1.0
            longer = self._longest_prefix(option)
            mass[choice] += p
            if longer is not None and best > -math.inf:
                mass[self._options[longer]] -= p
        total = sum(max(0.0, p) for p in mass.values())
        self.probabilities = {choice: max(0.0, p) / total for choice, p in mass.items()}
        self.choice = _drawn(self.probabilities, self.sampling)
        spelled = [option for option, choice in self._options.items() if choice == self.choice]
        self.n_tokens = len(max(spelled, key=lambda option: logs[option]))
        if self._on_finish is not None:
            self._on_finish(self.choice)

    def _longest_prefix(self, option: tuple[int, ...]) -> tuple[int, ...] | None:
        """The longest other option that an option continues."""
        return next((option[:n] for n in range(len(option) - 1, 0, -1) if option[:n] in self._options), None)


@dataclass(slots=True)
class _Inner:
    """A node of the options' tree that something follows: the tokens up to it, and its children's scores."""

    path: tuple[int, ...]
    children: dict[int, float] = field(default_factory=dict)


def _inner_nodes(options: Iterable[tuple[int, ...]]) -> list[_Inner]:
    """The inner nodes in depth-first order, the root first."""
    nodes: dict[tuple[int, ...], _Inner] = {}
    for option in options:
        for n, token in enumerate(option):
            nodes.setdefault(option[:n], _Inner(option[:n])).children[token] = 0.0
    ordered: list[_Inner] = []
    pending = [nodes[()]]
    while pending:
        node = pending.pop()
        ordered.append(node)
        below = [(*node.path, token) for token in node.children]
        pending += [nodes[path] for path in reversed(below) if path in nodes]
    return ordered


def _chains(nodes: Sequence[_Inner]) -> list[list[_Inner]]:
    """Nodes in depth-first order, cut where one is not right below the one before it."""
    chains = [[nodes[0]]]
    for before, node in pairwise(nodes):
        if node.path[:-1] == before.path:
            chains[-1].append(node)
        else:
            chains.append([node])
    return chains


def _drawn(probabilities: Mapping[str, float], sampling: Sampling) -> str:
    """The likeliest choice, of equals the first; with a temperature one that is drawn."""
    ranked = sorted(probabilities, key=lambda choice: -probabilities[choice])
    if sampling.temperature == 0:
        return ranked[0]
    top = probabilities[ranked[0]]
    weights = [(probabilities[choice] / top) ** (1 / sampling.temperature) for choice in ranked]
    reached, kept = 0.0, 0
    while kept < len(ranked) and (not kept or reached < sampling.top_p * sum(weights)):
        reached, kept = reached + weights[kept], kept + 1
    return random.Random(sampling.seed).choices(ranked[:kept], weights[:kept])[0]


class ReasoningOutput(OutputState):
    """Reasoning in words and coordinates, and the answer behind it.

    Whether a step belongs to the reasoning or to the answer is known once the step ahead of it is read. So steps are
    launched as REASONING until then, and `rule` says what they are: the token that ends the reasoning is the first of
    the suffix, so what is fed behind it is right whatever the step turns out to be.

    Args:
        answer: the state machine of the answer.
        tokens: the model's.
        max_tokens: most tokens of the reasoning.
        decode: text of token ids.
        sampling: how its tokens are sampled; that of the answer must be the same.

    Attributes:
        answer: as above.
    """

    __slots__ = (
        "_chunks",
        "_decode",
        "_keeps_on",
        "_open",
        "_reasoned",
        "_suffix_left",
        "answer",
        "max_tokens",
        "tokens",
    )
    phases = (Phase.REASONING,)

    def __init__(
        self,
        answer: OutputState,
        tokens: ReasoningTokens,
        max_tokens: int,
        decode: Callable[[Sequence[int]], str],
        sampling: Sampling = GREEDY,
    ) -> None:
        between = max_tokens + len(tokens.suffix)
        super().__init__(between + answer.steps if answer.steps > 0 else 0, sampling)
        self.answer, self.tokens, self.max_tokens = answer, tokens, max_tokens
        self._decode = decode
        self._chunks: list[tuple[list[int], list[float]]] = [([], [])]  # tokens, and the coordinates among them
        self._reasoned = 0  # tokens
        self._suffix_left: deque[int] | None = None  # None while it reasons
        # A choice's probabilities must not be made up: there the reasoning cannot end the answer.
        self._keeps_on = not isinstance(answer, TextOutput) and tokens.end >= 0 and tokens.end not in tokens.forbidden
        self._open = 0  # steps that were launched as REASONING and have no rule yet

    @property
    def positions(self) -> int:
        """Those of the reasoning, the suffix and the answer."""
        return self.max_tokens + len(self.tokens.suffix) + self.answer.positions

    def next_phase(self) -> Phase | None:
        """REASONING until the answer is known to have begun."""
        self.back = 0
        if self._suffix_left is None or self._suffix_left:
            self._open += 1
            return Phase.REASONING
        phase = self.answer.next_phase()
        self.back = self.answer.back
        return phase

    def vocabulary(self) -> Iterable[int]:
        """The suffix, and what the answer may be."""
        return [*self.tokens.suffix, *self.answer.vocabulary()]

    def rule(self) -> TokenRule:
        """What the step turns out to be: reasoning, suffix or answer."""
        if not self._open:
            return self.answer.rule()
        self._open -= 1
        if self._suffix_left is None:
            if self._reasoned == self.max_tokens:
                return TokenRule(allowed=self.tokens.suffix[:1])
            forbidden = self.tokens.forbidden if self._reasoned else ()
            if self._keeps_on:
                forbidden = (*forbidden, self.tokens.end)
            return TokenRule(forbidden=forbidden, grounded=True)
        if self._suffix_left:
            return TokenRule(allowed=(self._suffix_left[0],))
        self.answer.next_phase()  # its first, TOKEN: no more than one step is launched before it is known
        return self.answer.rule()

    def commit(self, sampled: Sampled) -> bool:
        """Take a token; True when the answer is complete."""
        if self._suffix_left is None:
            return self._reason(int(sampled[0]), sampled[1])
        if self._suffix_left:
            self._suffix_left.popleft()
            return False
        return self.answer.commit(sampled)

    def _reason(self, token: int, coordinate: float) -> bool:
        if token == self.tokens.answer or self._reasoned == self.max_tokens:
            self._suffix_left = deque(self.tokens.suffix[1:])
            return False
        if token == self.tokens.end and token not in self.tokens.forbidden:
            return True
        self._reasoned += 1
        if token in self.tokens.grounds:
            self._chunks.append(([], []))
        ids, coordinates = self._chunks[-1]
        ids.append(token)
        if token == self.tokens.coord:
            coordinates.append(coordinate)
        return False

    def finish(self) -> None:
        """Complete the answer."""
        self.answer.finish()

    @property
    def n_tokens(self) -> int:
        """Tokens of the reasoning."""
        return self._reasoned

    @property
    def reasoning(self) -> Reasoning:
        """The text, and the points that the coordinates of its pieces make in pairs; one without its pair is no point.

        Pieces are decoded one by one, as the reference does, and a piece with a single coordinate grounds nothing.
        """
        text, grounding = "", []
        for ids, coordinates in self._chunks:
            piece = self._decode(ids)
            points = tuple(zip(coordinates[::2], coordinates[1::2], strict=False))
            if points:
                grounding.append(Grounding(len(text), len(text) + len(piece), points))
            text += piece
        return Reasoning(text, tuple(grounding))
