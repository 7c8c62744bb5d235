"""The code blocks of a Markdown document, and the commands of a shell block."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(slots=True, frozen=True)
class Block:
    """One fenced block.

    Attributes:
        path: of the document.
        line: the first one of its text, from 1.
        language: what the block is coloured as, such as "python"; "" for none.
        title: what follows the language; the name of the file that it is, if any.
        text: without the fences.
    """

    path: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """The fenced blocks of a document, in the order shown."""
    document = path.read_text(encoding="utf-8")
    blocks = []
    for match in _FENCE.finditer(document):
        language, _, title = match["info"].strip().partition(" ")
        line = document.count("\n", 0, match.start("text")) + 1
        blocks.append(Block(path, line, language, title, match["text"]))
    return blocks


def indented_code(path: Path) -> list[str]:
    """Lines that Markdown shows as code without a fence, hence without a language."""
    document = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return re.findall(r"(?<=\n\n) {4}[^\n]+", document)


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, without comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words
