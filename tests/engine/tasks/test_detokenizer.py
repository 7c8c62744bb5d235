"""Text that comes token by token is the text of all tokens, whole characters only, cut before the first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from saccade.engine.models.moondream.prompts import CodePointTokenizer, FileTokenizer
from saccade.engine.tasks.text import Detokenizer
from tests.support.engine import NANO

Decode = Callable[[Sequence[int]], str]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    """A tokenizer of the published models' kind: bytes, and some merges that end inside characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("ab", "c"), ("Ġ", "a"), ("Ã", "©"), ("ð", "Ł"), ("c", "Ã")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def cut(text: str, stop: Sequence[str]) -> str:
    """The same by one character after the other."""
    for end in range(1, len(text) + 1):
        done = [one for one in stop if text[:end].endswith(one)]
        if done:
            return text[: end - max(map(len, done))]
    return text


def hear(decode: Decode, tokens: Sequence[int], stop: Sequence[str]) -> tuple[list[str], str, int]:
    """The pieces, the text, and how many tokens were wanted."""
    pieces: list[str] = []
    detokenizer = Detokenizer(decode, stop, pieces.append)
    wanted = next((n for n, token in enumerate(tokens, 1) if detokenizer.add(token)), len(tokens))
    detokenizer.end()
    detokenizer.end()
    return pieces, detokenizer.text, wanted


STOPS = st.lists(st.text("abc é😀\n", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300, deadline=None)
@given(text=st.text("abc é😀\n", max_size=30), stop=STOPS)
def test_words_come_whole_and_end_before_the_first_stop(byte_level: Tokenizer, text: str, stop: list[str]) -> None:
    tokens = byte_level.encode(text).ids
    pieces, heard, _ = hear(byte_level.decode, tokens, stop)
    assert heard == "".join(pieces) == cut(text, stop)
    assert all(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(st.integers(0, 261), max_size=30), stop=STOPS)
def test_bytes_that_are_no_text_come_as_the_codec_gives_them(
    byte_level: Tokenizer, tokens: list[int], stop: list[str]
) -> None:
    pieces, heard, _ = hear(byte_level.decode, tokens, stop)
    assert heard == "".join(pieces) == cut(byte_level.decode(tokens), stop)


@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(st.integers(10, 40), max_size=12))
@pytest.mark.parametrize("decode", [CodePointTokenizer().decode, FileTokenizer(NANO / "tokenizer.json").decode])
def test_codecs_that_join_words_give_the_same_pieces(decode: Decode, tokens: list[int]) -> None:
    assert hear(decode, tokens, ())[1] == decode(tokens)


@pytest.mark.parametrize(
    ("tokens", "stop", "pieces", "wanted"),
    [
        ("a b c", (), ["a", " ", "b", " ", "c"], 5),
        ("a--b", ("--",), ["a"], 3),
        ("a-b-", ("--",), ["a", "-b", "-"], 4),  # what may begin a stop string waits for what comes next
        ("END", ("END",), [], 3),
        ("xab", ("abc", "b"), ["x", "a"], 3),  # complete first, although the other began before it
        ("xabc", ("abc", "c"), ["x"], 4),  # of two that end together the longest
        ("aab", ("ab",), ["a"], 3),
    ],
)
def test_pieces_come_as_early_as_is_certain(tokens: str, stop: tuple[str, ...], pieces: list[str], wanted: int) -> None:
    def decode(ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    assert hear(decode, list(map(ord, tokens)), stop) == (pieces, "".join(pieces), wanted)


def test_the_work_of_a_long_text_grows_with_its_length_only() -> None:
    longest = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join(map(chr, ids))

    assert hear(decode, [ord("x")] * 1000, ("xxy",))[1] == "x" * 1000
    assert longest == 2
