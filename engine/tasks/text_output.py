"""State machines of text answers: free text, choices with probabilities, and reasoning before an answer."""

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
from saccade.engine.tasks.task import GREEDY, MAX_SCORED, FedValue, OutputState, Sampled, Sampling, TokenRule

if TYPE_CHECKING:
    from saccade.engine.models.protocol import ReasoningTokens


class TextOutput(OutputState):
    """Answer of query and caption: tokens until the end token, `max_tokens` or a stop string.

    Args:
        eos: end token.
        max_tokens: maximum number of tokens.
        max_steps: maximum number of steps that fit the context.
        sampling: sampling parameters.
        on_token: called with each token except the end token; returning True ends the answer.
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
        """Return TOKEN first and LATER_TOKEN afterwards."""
        first = not self._launched
        phase = super().next_phase()
        return phase if phase is None or first else Phase.LATER_TOKEN

    @property
    def draftable(self) -> bool:
        """Whether the text is greedy; sampled text is meant to vary."""
        return self.sampling.temperature == 0

    def fed(self, phase: Phase, sampled: Sampled) -> FedValue | None:
        """Return the token as input, or None at the end of the text."""
        return None if int(sampled[0]) == self._eos else (Phase.TOKEN, sampled[0], 0.0)

    def values(self) -> list[FedValue]:
        """Return the tokens as inputs."""
        return [(Phase.TOKEN, float(token), 0.0) for token in self.tokens]

    def commit(self, sampled: Sampled) -> bool:
        """Take a token; return True at the end of the text."""
        token = int(sampled[0])
        if token == self._eos:
            return True
        self.tokens.append(token)
        return (self._on_token is not None and self._on_token(token)) or len(self.tokens) == self.steps

    def finish(self) -> None:
        """Call `on_finish`, which releases withheld text."""
        if self._on_finish is not None:
            self._on_finish()


class _TreeWalk(OutputState):
    """Scores inner nodes of a tree of options, one per step, in depth-first order.

    Args:
        nodes: nodes to score; the path of the first is already fed.
        sampling: sampling parameters.
    """

    __slots__ = ("_committed", "_nodes", "_ruled")
    phases = (Phase.TOKEN,)

    def __init__(self, nodes: Sequence[_Inner], sampling: Sampling) -> None:
        super().__init__(len(nodes), sampling)
        self._nodes = nodes
        self._committed = self._ruled = 0

    @property
    def positions(self) -> int:
        """Maximum depth of the nodes below the first node."""
        return max(len(node.path) for node in self._nodes) - len(self._nodes[0].path) if self.steps else 0

    @property
    def certain(self) -> Sequence[FedValue]:
        """Tokens of the chain that starts at the first node."""
        return [(Phase.TOKEN, float(node.path[-1]), 0.0) for node in _chains(self._nodes)[0][1:]]

    def next_phase(self) -> Phase | None:
        """Return TOKEN for the root and LATER_TOKEN for all other nodes."""
        number = self._launched
        phase = super().next_phase()
        if phase is None or not self._nodes[number].path:
            return phase
        if number:
            self.back = len(self._nodes[number - 1].path) + 1 - len(self._nodes[number].path)
        return Phase.LATER_TOKEN

    def rule(self) -> TokenRule:
        """Request the scores of a node's children, and force the token of the next node."""
        node, self._ruled = self._nodes[self._ruled], self._ruled + 1
        following = self._nodes[self._ruled].path[-1] if self._ruled < len(self._nodes) else next(iter(node.children))
        return TokenRule(allowed=(following,), scored=tuple(node.children))

    def commit(self, sampled: Sampled) -> bool:
        """Take the scores of a node's children; return True after the last node."""
        node = self._nodes[self._committed]
        self._committed += 1
        for token, score in zip(node.children, sampled[3:], strict=True):
            node.children[token] = -math.inf if math.isnan(score) else score
        return self._committed == self.steps


class ChoiceOutput(_TreeWalk):
    """Answer of query with choices: a probability for each choice, and the most likely or a sampled choice.

    The probability of an option is the product of its token probabilities, minus that of other choices' options that
    continue it. The probability of a choice is the sum of its options; all are normalized to 1.

    The options form a tree of tokens. Each step feeds one inner node in depth-first order and returns the log
    probabilities of its children; later branches overwrite earlier ones, see `back`. With single-token options, the
    prefill alone answers. Branches make that possible for all options.

    Args:
        options: choice of each non-empty token sequence.
        max_steps: maximum number of steps that fit the context; `steps` is 0 if the longest option needs more.
        sampling: with temperature T, a choice is drawn by its probability to the power 1 / T, within `top_p`.
        on_finish: called with the choice when the answer is complete.

    Attributes:
        probabilities: probability of each choice, set by `finish`.
        choice: the answer, set by `finish`.
        n_tokens: tokens of the choice's most likely option, set by `finish`.

    Raises:
        ValueError: if a node has more than `MAX_SCORED` children.
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
            raise ValueError(f"at most {MAX_SCORED} choices may start with the same tokens")
        super().__init__(self._tree, sampling)
        if max(map(len, options)) > max_steps:
            self.steps = 0
        self.probabilities: dict[str, float] = {}
        self.choice, self.n_tokens = "", 0

    def branches(self, most: int) -> Sequence[tuple[tuple[int, ...], OutputState]]:
        """Return the chains of nodes that the first option does not reach, each after its own tokens."""
        own, *others = _chains(self._tree)
        if len(others) > most:
            return ()
        self._nodes, self.steps = own, len(own)
        return [(chain[0].path, _TreeWalk(chain, self.sampling)) for chain in others]

    def vocabulary(self) -> Iterable[int]:
        """Return the tokens of all options."""
        return {token for option in self._options for token in option}

    def finish(self) -> None:
        """Compute the probabilities, decide, and report the choice."""
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
        """Return the longest other option that is a prefix of an option, or None."""
        return next((option[:n] for n in range(len(option) - 1, 0, -1) if option[:n] in self._options), None)


@dataclass(slots=True)
class _Inner:
    """An inner node of the option tree: its path, and the scores of its children."""

    path: tuple[int, ...]
    children: dict[int, float] = field(default_factory=dict)


def _inner_nodes(options: Iterable[tuple[int, ...]]) -> list[_Inner]:
    """Return the inner nodes in depth-first order, the root first."""
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
    """Split nodes in depth-first order into chains in which each node is a child of the previous one."""
    chains = [[nodes[0]]]
    for before, node in pairwise(nodes):
        if node.path[:-1] == before.path:
            chains[-1].append(node)
        else:
            chains.append([node])
    return chains


def _drawn(probabilities: Mapping[str, float], sampling: Sampling) -> str:
    """Return the most likely choice (the first of equals), or a sampled one with a temperature."""
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
    """Reasoning in words and coordinates, followed by the answer.

    Whether a step belongs to the reasoning is known only after the previous step is read. Steps are therefore launched
    as REASONING, and `rule` decides later. The token that ends the reasoning is the first of the suffix, so the input
    is correct in both cases.

    Args:
        answer: state machine of the answer.
        tokens: special tokens for reasoning.
        max_tokens: maximum number of reasoning tokens.
        decode: returns the text of token IDs.
        sampling: sampling parameters, equal to those of the answer.

    Attributes:
        answer: state machine of the answer.
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
        """Positions of the reasoning, the suffix and the answer."""
        return self.max_tokens + len(self.tokens.suffix) + self.answer.positions

    def next_phase(self) -> Phase | None:
        """Return REASONING until the answer is known to have started."""
        self.back = 0
        if self._suffix_left is None or self._suffix_left:
            self._open += 1
            return Phase.REASONING
        phase = self.answer.next_phase()
        self.back = self.answer.back
        return phase

    def vocabulary(self) -> Iterable[int]:
        """Return the tokens of the suffix and of the answer."""
        return [*self.tokens.suffix, *self.answer.vocabulary()]

    def rule(self) -> TokenRule:
        """Return the constraints of the step, which may belong to reasoning, suffix or answer."""
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
        """Take a token; return True when the answer is complete."""
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
        """Finish the answer."""
        self.answer.finish()

    @property
    def n_tokens(self) -> int:
        """Number of reasoning tokens."""
        return self._reasoned

    @property
    def reasoning(self) -> Reasoning:
        """Reasoning text, and points made of coordinate pairs; a coordinate without its pair is dropped.

        Pieces are decoded one by one, as in the reference.
        """
        text, grounding = "", []
        for ids, coordinates in self._chunks:
            piece = self._decode(ids)
            points = tuple(zip(coordinates[::2], coordinates[1::2], strict=False))
            if points:
                grounding.append(Grounding(len(text), len(text) + len(piece), points))
            text += piece
        return Reasoning(text, tuple(grounding))
