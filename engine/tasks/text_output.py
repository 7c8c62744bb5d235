"""State machines that decode text answers: free text, choices with probabilities, and reasoning before an answer."""

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
    """State machine that decodes free text. The end token, a stop string or the limit `max_tokens` ends the text.

    Args:
        eos: ID of the end token.
        max_tokens: maximum number of tokens.
        max_steps: maximum number of decoding steps that fit into the context.
        sampling: sampling parameters.
        on_token: callback that receives each token except the end token. The text ends when the callback returns True.
        on_finish: callback that is called once, at the end of the text.
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
        """Return the phase of the next token, or None if the text is complete. The first token has its own phase."""
        first = not self._launched
        phase = super().next_phase()
        return phase if phase is None or first else Phase.LATER_TOKEN

    @property
    def draftable(self) -> bool:
        """Whether this text can be the draft of the next answer (speculative decoding). Requires greedy sampling."""
        return self.sampling.temperature == 0

    def fed(self, phase: Phase, sampled: Sampled) -> FedValue | None:
        """Return the sampled token as the next input of the decoder. Return None for the end token."""
        return None if int(sampled[0]) == self._eos else (Phase.TOKEN, sampled[0], 0.0)

    def values(self) -> list[FedValue]:
        """Return the tokens of the text so far, as inputs of the decoder."""
        return [(Phase.TOKEN, float(token), 0.0) for token in self.tokens]

    def commit(self, sampled: Sampled) -> bool:
        """Add a sampled token. Return True if the text is complete."""
        token = int(sampled[0])
        if token == self._eos:
            return True
        self.tokens.append(token)
        return (self._on_token is not None and self._on_token(token)) or len(self.tokens) == self.steps

    def finish(self) -> None:
        """Call `on_finish` at the end of the text."""
        if self._on_finish is not None:
            self._on_finish()


class _TreeWalk(OutputState):
    """State machine that visits the inner nodes of a trie (prefix tree) of token sequences, in depth-first order.

    Each decoding step visits one node, and returns the log probabilities of the node's children.

    Args:
        nodes: inner nodes to visit. The prompt must end with the tokens on the path to the first node.
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
        return max(len(node.path) for node in self._nodes) - len(self._nodes[0].path) if self.steps else 0

    @property
    def certain(self) -> Sequence[FedValue]:
        return [(Phase.TOKEN, float(node.path[-1]), 0.0) for node in _chains(self._nodes)[0][1:]]

    def next_phase(self) -> Phase | None:
        number = self._launched
        phase = super().next_phase()
        if phase is None or not self._nodes[number].path:
            return phase
        if number:
            self.back = len(self._nodes[number - 1].path) + 1 - len(self._nodes[number].path)
        return Phase.LATER_TOKEN

    def rule(self) -> TokenRule:
        node, self._ruled = self._nodes[self._ruled], self._ruled + 1
        following = self._nodes[self._ruled].path[-1] if self._ruled < len(self._nodes) else next(iter(node.children))
        return TokenRule(allowed=(following,), scored=tuple(node.children))

    def commit(self, sampled: Sampled) -> bool:
        node = self._nodes[self._committed]
        self._committed += 1
        for token, score in zip(node.children, sampled[3:], strict=True):
            node.children[token] = -math.inf if math.isnan(score) else score
        return self._committed == self.steps


class ChoiceOutput(_TreeWalk):
    """State machine of a query with choices. It computes the probability of each choice and selects one choice.

    Each choice has one or more *options*: the token sequences of its spellings. The probability of a choice is the sum
    of the probabilities of its options, normalized so that all choices sum to 1. The probability of an option excludes
    longer options of other choices that start with it.

    The options form a trie (prefix tree). Each decoding step processes one inner node in depth-first order, and returns
    the log probabilities of its children. `branches` can score the branches in parallel, as separate sequences.

    Args:
        options: choice that each option spells, keyed by the option's token IDs. An option must not be empty.
        max_steps: maximum number of decoding steps that fit into the context. If the longest option needs more, `steps`
            is 0.
        sampling: temperature 0 selects the most likely choice. Temperature T samples a choice in proportion to its
            probability to the power 1 / T, within `top_p`.
        on_finish: callback that receives the selected choice.

    Attributes:
        probabilities: probability of each choice, set by `finish`.
        choice: the selected choice, set by `finish`.
        n_tokens: number of tokens in the most likely option of the selected choice, set by `finish`.

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
            raise ValueError(f"at most {MAX_SCORED} choices can start with the same tokens; give fewer choices")
        super().__init__(self._tree, sampling)
        if max(map(len, options)) > max_steps:
            self.steps = 0
        self.probabilities: dict[str, float] = {}
        self.choice, self.n_tokens = "", 0

    def branches(self, most: int) -> Sequence[tuple[tuple[int, ...], OutputState]]:
        """Split the trie (prefix tree) of options into branches, which are decoded in parallel as separate sequences.

        The path from the root to the first node of a branch is appended to the prompt of the branch.
        """
        own, *others = _chains(self._tree)
        if len(others) > most:
            return ()
        self._nodes, self.steps = own, len(own)
        return [(chain[0].path, _TreeWalk(chain, self.sampling)) for chain in others]

    def vocabulary(self) -> Iterable[int]:
        """Return the token IDs of all options."""
        return {token for option in self._options for token in option}

    def finish(self) -> None:
        """Compute the probability of each choice, select a choice, and call the callback `on_finish`."""
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
        """Return the longest other option that is a prefix of `option`, or None if there is none."""
        return next((option[:n] for n in range(len(option) - 1, 0, -1) if option[:n] in self._options), None)


@dataclass(slots=True)
class _Inner:
    """An inner node of a trie (prefix tree) of token sequences.

    Attributes:
        path: token IDs from the root to the node.
        children: log probability of each token that can follow the path.
    """

    path: tuple[int, ...]
    children: dict[int, float] = field(default_factory=dict)


def _inner_nodes(options: Iterable[tuple[int, ...]]) -> list[_Inner]:
    """Return the inner nodes of the trie (prefix tree) of all options, in depth-first order from the root."""
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
    """Split trie nodes in depth-first order into chains. In a chain, each node is the parent of the next node."""
    chains = [[nodes[0]]]
    for before, node in pairwise(nodes):
        if node.path[:-1] == before.path:
            chains[-1].append(node)
        else:
            chains.append([node])
    return chains


def _drawn(probabilities: Mapping[str, float], sampling: Sampling) -> str:
    """Return the most likely choice if the temperature is 0. Otherwise sample from the scaled probabilities."""
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
    """State machine that decodes reasoning (text with coordinates), a fixed token suffix, and the answer.

    Args:
        answer: state machine of the answer.
        tokens: special tokens for reasoning.
        max_tokens: maximum number of reasoning tokens.
        decode: function that returns the text of token IDs.
        sampling: sampling parameters; the answer must have the same ones.

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
    # A step may launch before the end of the reasoning is known. All steps have this phase; `rule` restricts tokens.
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
        # Chunks of the reasoning: token IDs and coordinates.
        self._chunks: list[tuple[list[int], list[float]]] = [([], [])]
        self._reasoned = 0  # number of reasoning tokens
        self._suffix_left: deque[int] | None = None  # None during the reasoning
        # With choices, the reasoning must not end the answer, because the probabilities would be missing.
        self._keeps_on = not isinstance(answer, TextOutput) and tokens.end >= 0 and tokens.end not in tokens.forbidden
        self._open = 0  # steps that are launched as REASONING and not yet finalized

    @property
    def positions(self) -> int:
        """Maximum number of KV cache positions that the reasoning and the answer need."""
        return self.max_tokens + len(self.tokens.suffix) + self.answer.positions

    def next_phase(self) -> Phase | None:
        """Return the phase of the next token: REASONING until the answer begins, then a phase of the answer.

        Return None if the answer is complete.
        """
        self.back = 0
        if self._suffix_left is None or self._suffix_left:
            self._open += 1
            return Phase.REASONING
        phase = self.answer.next_phase()
        self.back = self.answer.back
        return phase

    def vocabulary(self) -> Iterable[int]:
        """Return the IDs of all tokens to which sampling can be restricted after the reasoning."""
        return [*self.tokens.suffix, *self.answer.vocabulary()]

    def rule(self) -> TokenRule:
        """Return the constraints on the next token."""
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
        # The first phase of the answer is TOKEN; at most one step was launched before this was known.
        self.answer.next_phase()
        return self.answer.rule()

    def commit(self, sampled: Sampled) -> bool:
        """Add a sampled token. Return True when the answer is complete."""
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
        """Finish the answer that follows the reasoning."""
        self.answer.finish()

    @property
    def n_tokens(self) -> int:
        """Number of generated reasoning tokens."""
        return self._reasoned

    @property
    def reasoning(self) -> Reasoning:
        """Reasoning text and the points in the text. Each point consists of two consecutive coordinates."""
        text, grounding = "", []
        for ids, coordinates in self._chunks:  # decoded separately, as in Moondream's reference implementation
            piece = self._decode(ids)
            points = tuple(zip(coordinates[::2], coordinates[1::2], strict=False))
            if points:
                grounding.append(Grounding(len(text), len(text) + len(piece), points))
            text += piece
        return Reasoning(text, tuple(grounding))
