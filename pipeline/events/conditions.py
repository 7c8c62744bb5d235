"""The rule language: parses the `when` key of a rule into a `Condition`.

    person in door for 10s                     car or "traffic light" in yard
    person crosses gate outward                count of person in lobby > 5 for 30s
    person absent from desk for 5m             any between 22:00 and 06:00
    car stationary in yard for 5m              person moving in yard
    parcel appeared in porch                   parcel removed from porch
    camera reports motion                      camera reports input for 2s

`GRAMMAR` is the grammar for the parser library lark. A syntax error names the column and the expected words.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import time
from functools import cache, lru_cache
from typing import Any, Literal, get_args

from lark import Lark, Token, Transformer, UnexpectedInput, UnexpectedToken

from saccade.pipeline.settings import PlacedError, read_seconds

Kind = Literal["present", "inside", "crosses", "count", "absent", "removed", "reports"]
Motion = Literal["moving", "stationary", "appeared"]
Direction = Literal["forward", "backward"]

GRAMMAR = r"""
start: condition [FOR DURATION] [BETWEEN CLOCK AND CLOCK]

?condition: labels [MOTION]                            -> present
          | labels [MOTION] IN name                    -> inside
          | labels CROSSES name [DIRECTION]            -> crosses
          | COUNT [OF labels] [IN name] COMPARE NUMBER -> count
          | labels ABSENT [FROM name]                  -> absent
          | labels REMOVED [FROM name]                 -> removed
          | ABSENT [FROM name]                         -> all_absent
          | CAMERA REPORTS name                        -> reports

labels: ANY | name (OR name)*
name: WORD | QUOTED | CAMERA

FOR: "for"i
BETWEEN: "between"i
AND: "and"i
IN: "in"i
CROSSES: "crosses"i
COUNT: "count"i
OF: "of"i
ABSENT: "absent"i
CAMERA: "camera"i
REPORTS: "reports"i
REMOVED: "removed"i
MOTION: "moving"i | "stationary"i | "appeared"i
FROM: "from"i
ANY: "any"i
OR: "or"i
DIRECTION: "forward"i | "backward"i | "inward"i | "outward"i
COMPARE: ">=" | "<=" | "!=" | ">" | "<" | "="
NUMBER: /\d{1,6}\b/
DURATION: /\d+(\.\d+)?(ms|s|m|h)\b/i
CLOCK: /([01]?\d|2[0-3]):[0-5]\d\b/
WORD.-1: /[^\W\d][\w-]*/
QUOTED: /"[^"]+"/
%ignore /\s+/
"""
"""Grammar of conditions, in lark's notation.

`inward` means `forward`; `outward` means `backward`; names with spaces need quotes.
"""

_SHOWN = {
    "WORD": "a name",
    "QUOTED": None,  # also a name
    "CAMERA": None,  # a label, too; the errors need not offer it
    "DURATION": "a time such as 10s, 5m or 1h",
    "CLOCK": "a time of day such as 22:00",
    "NUMBER": "a whole number",
    "COMPARE": "one of > >= < <= = !=",
    "DIRECTION": "forward or backward",
    "MOTION": "'moving', 'stationary', 'appeared'",
    "$END": "the end",
}
_SIGNAL = re.compile(r"motion|input( .+)?")
_KEYWORDS = set(re.findall(r'"(\w+)"i', GRAMMAR))
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
}


@dataclass(slots=True, frozen=True)
class Condition:
    """The condition of a rule, such as "person in door for 10s".

    Attributes:
        kind: kind of condition. `present`, `inside`, `crosses` and `removed` are evaluated per track, `count` and
            `absent` on the whole frame, and `reports` on the signals of the camera.
        labels: labels of the objects to consider; empty for all labels.
        place: name of the zone, or name of the line for `crosses`; None for the whole image.
        direction: direction of a crossing; None for both directions.
        compare, number: comparison operator and number of a `count` condition.
        for_s: how long the condition must be true before the event begins, in seconds. For `removed`, how long the
            object must be missing, at least `REMOVED_S`.
        between: start and end of the time of day in which the condition can be true. The period spans midnight if the
            start is later than the end.
        place_at: character position of the place name in the text.
        signal: signal of the camera, for `reports`: `motion`, `input` or `input TOKEN`.
        motion: consider only objects that are moving, are stationary or have appeared; None for all objects.
    """

    kind: Kind
    labels: tuple[str, ...] = ()
    place: str | None = None
    direction: Direction | None = None
    compare: str = ">"
    number: int = 0
    for_s: float = 0.0
    between: tuple[time, time] | None = None
    place_at: int = 0
    motion: Motion | None = None
    signal: str = ""

    def fits(self, count: int) -> bool:
        """Return whether a number of objects satisfies the comparison of a `count` condition, such as `> 5`."""
        return _COMPARE[self.compare](count, self.number)

    def open_at(self, now: time) -> bool:
        """Return whether a time of day is within the period `between`."""
        if self.between is None:
            return True
        begin, end = self.between
        return begin <= now < end if begin <= end else now >= begin or now < end


@lru_cache(256)
def parse(text: str) -> Condition:
    """Parse the condition of a rule.

    Raises:
        PlacedError: if the text is not a valid condition. The message names the expected words, and `offset` is the
            character position of the error.
    """
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        raise PlacedError(_explain(error, text), _offset(error, text)) from None
    condition: Condition = _Reader().transform(tree)
    if condition.kind == "crosses" and condition.for_s:
        raise PlacedError("the condition 'crosses' cannot have a duration: remove 'for'", text.lower().rindex("for"))
    if condition.kind == "reports" and not _SIGNAL.fullmatch(condition.signal):
        raise PlacedError('unknown camera signal: use motion, input, or "input ID"', condition.place_at)
    if condition.between is not None and condition.between[0] == condition.between[1]:
        raise PlacedError("the condition 'between' requires two different times of day", text.lower().rindex("between"))
    if condition.kind == "count" and condition.number == 0 and condition.compare in ("<", ">="):
        never = "never" if condition.compare == "<" else "always"
        raise PlacedError(
            f"this condition is {never} true, because a count is at least 0: use another comparison",
            text.index(condition.compare),
        )
    return condition


@cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr", maybe_placeholders=True)


class _Reader(Transformer[Token, Condition]):
    """Builds a condition from the parse tree of its text. Each method handles one grammar rule."""

    def name(self, words: list[Token]) -> Token:
        return Token("NAME", words[0].strip('"'), start_pos=words[0].start_pos)

    def labels(self, names: list[Token]) -> tuple[str, ...]:
        """Return the label names as a tuple. The word `any` gives an empty tuple, which means all labels."""
        return tuple(str(name) for name in names if name.type == "NAME")

    def present(self, found: list) -> Condition:  # type: ignore[type-arg]
        labels, motion = found
        return Condition("present", labels, motion=_motion(motion))

    def inside(self, found: list) -> Condition:  # type: ignore[type-arg]
        labels, motion, _, place = found
        return Condition("inside", labels, str(place), place_at=place.start_pos, motion=_motion(motion))

    def crosses(self, found: list) -> Condition:  # type: ignore[type-arg]
        labels, _, place, way = found
        direction: Direction | None = None
        if way is not None:
            direction = "forward" if way.lower() in ("forward", "inward") else "backward"
        return Condition("crosses", labels, str(place), direction, place_at=place.start_pos)

    def count(self, found: list) -> Condition:  # type: ignore[type-arg]
        _, _, labels, _, place, compare, number = found
        where = None if place is None else str(place)
        at = 0 if place is None else place.start_pos
        return Condition("count", labels or (), where, None, str(compare), int(number), place_at=at)

    def absent(self, found: list) -> Condition:  # type: ignore[type-arg]
        labels, _, _, place = found
        at = 0 if place is None else place.start_pos
        return Condition("absent", labels, None if place is None else str(place), place_at=at)

    def removed(self, found: list) -> Condition:  # type: ignore[type-arg]
        return replace(self.absent(found), kind="removed")

    def all_absent(self, found: list) -> Condition:  # type: ignore[type-arg]
        return self.absent([(), *found])

    def reports(self, found: list) -> Condition:  # type: ignore[type-arg]
        return Condition("reports", signal=str(found[-1]), place_at=found[-1].start_pos)

    def start(self, found: list) -> Condition:  # type: ignore[type-arg]
        """Build the complete condition, including its `for` and `between` clauses."""
        condition, _, duration, _, begin, _, end = found
        for_s: Any = 0.0 if duration is None else read_seconds(duration.lower())
        between = None if begin is None else (time.fromisoformat(_padded(begin)), time.fromisoformat(_padded(end)))
        made: Condition = replace(condition, for_s=for_s, between=between)
        return made


def _motion(word: str | None) -> Motion | None:
    known: tuple[Motion, ...] = get_args(Motion)
    return None if word is None else known[known.index(word.lower())]


def _padded(clock: str) -> str:
    return clock.rjust(5, "0")


def _offset(error: UnexpectedInput, text: str) -> int:
    at = error.pos_in_stream
    ended = at is None or at < 0 or (isinstance(error, UnexpectedToken) and error.token.type == "$END")
    return len(text.rstrip()) if ended else at or 0


def _explain(error: UnexpectedInput, text: str) -> str:
    at = _offset(error, text)
    reader = _parser().parse_interactive(text[:at])
    reader.exhaust_lexer()
    accepted = reader.accepts()  # type: ignore[no-untyped-call]
    shown = [_SHOWN.get(name, f"'{name.lower()}'") for name in accepted]
    expected = sorted(name for name in shown if name)
    rest = text[at:].strip()
    if accepted == {"DURATION"}:  # the number and its unit, as in "2 seconds"
        word = re.split(r"\s+between\b", rest, flags=re.IGNORECASE)[0]
    else:
        word = rest.split(maxsplit=1)[0] if rest else ""
    got = f"'{word}'" if word else "the end"
    return (
        f"expected {' or '.join(filter(None, (', '.join(expected[:-1]), *expected[-1:])))}, got {got}{_hint(text, at)}"
    )


def _hint(text: str, at: int) -> str:
    if text[at : at + 1] == '"':
        return ": the quote is not closed" if text.count('"') % 2 else ""
    if re.match(r"and\b", text[at:], re.IGNORECASE):
        return ": a rule has one condition; write another rule"
    before = re.search(r"(?:^|\s)([^\W\d][\w-]*)\s+$", text[:at])
    if before and before[1].lower() not in _KEYWORDS and re.match(r"[^\W\d]", text[at:]):
        return " (a name of several words goes in quotes)"
    return ""
