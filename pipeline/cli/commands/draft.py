"""The command `saccade rules draft`: converts an English sentence to a rule, by matching sentence templates.

The rule is only printed, not applied.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from saccade.pipeline.config.edit_rules import text_of_rules
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.settings import RuleSettings

_PEOPLE = r"some(?:one|body)|any(?:one|body)|people|persons?|visitors?|intruders?|wom[ae]n|m[ae]n|nobody|no one"
_LEAD = re.compile(
    r"^(?:please\s+)?(?:(?:tell|alert|notify|warn|inform|let)\s+me(?:\s+know)?(?:\s+|$)|alarm\s+)?"
    r"(?:when(?:ever)?|if|as soon as)?\s*"
)
_UNITS = {"s": "s", "m": "m", "h": "h"}
_AT = r"(?:in|at|on|near|from|by|inside|into)\s+(?:the|my|our|a)?\s*"
_VERBS = (  # words of a sentence → the words of a condition; the first that is found counts
    (r"\bcross(?:es|ed)?\b", "crosses"),
    (r"\b(?:removed|taken|stolen|disappears?|gone)\b", "removed"),
    (r"\b(?:appears?|appeared|left|delivered|put down|arrives?)\b", "appeared"),
    (r"\b(?:parks?|parked|stationary|stands? still|does not move)\b", "stationary"),
    (r"\b(?:moves?|moving|walks?|runs?|drives?)\b", "moving"),
)
_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "ten": 10}


def draft(sentence: str, zones: Collection[str] = (), lines: Collection[str] = ()) -> RuleSettings:
    """Convert an English sentence to a rule.

    Args:
        sentence: a sentence, such as "tell me when someone stands at the door for 10 s".
        zones: names of existing zones. The rule uses these names, even if the sentence spells them differently.
        lines: names of existing lines. The rule uses these names, even if the sentence spells them differently.

    Raises:
        ConfigError: if the sentence names no object, or it cannot be converted to a valid rule.
    """
    text = _LEAD.sub("", " ".join(sentence.lower().strip(" .!?").split()))
    text, times = _times(text)
    count = re.search(r"(more|fewer|less) than (\d+|[a-z]+)\s+", text)
    number = None if count is None else _number(count[2])
    if count is not None and number is not None:
        text = text[: count.start()] + text[count.end() :]
    absent = bool(re.match(r"(?:nobody|no one|no|there (?:is|are) no(?: one|body)?)\b", text))
    verb = next((word for pattern, word in _VERBS if re.search(pattern, text)), "")
    label = _label(text)
    place = _place(text, lines if verb == "crosses" else zones, crosses=verb == "crosses")
    shown = f'"{label}"' if " " in label else label
    where = f'"{place}"' if place and not re.fullmatch(r"[^\W\d][\w-]*", place) else place
    inside = f" in {where}" if where else ""
    if count is not None and number is not None:
        when = f"count of {shown}{inside} {'>' if count[1] == 'more' else '<'} {number}"
    elif absent:
        when = f"{shown} absent{f' from {where}' if where else ''}"
    elif verb == "crosses":
        when, times = f"{shown} crosses {where}", re.sub(r"for \S+", "", times).strip()
    elif verb == "removed":
        when = f"{shown} removed{f' from {where}' if where else ''}"
    else:
        when = f"{shown}{f' {verb}' if verb else ''}{inside}"
    name = re.sub(r"[^\w]+", "-", f"{label} {verb or ('absent' if absent else '')} {place}".strip())
    try:
        return RuleSettings.model_validate({"name": name[:64], "when": f"{when} {times}".strip()})
    except ValueError as error:
        raise ConfigError(
            f"the sentence cannot be converted to a valid rule ({when} {times}): {error}".splitlines()[0]
        ) from None


def draft_text(rule: RuleSettings, zones: Collection[str], lines: Collection[str]) -> str:
    """Return a rule as YAML. If its zone or line does not exist yet, add a comment."""
    place, kind = rule.condition.place, "line" if rule.condition.kind == "crosses" else "zone"
    missing = place is not None and place not in (lines if kind == "line" else zones)
    note = f"# Draw the {kind} '{place}' first; it does not exist yet.\n" if missing else ""
    return f"{note}rules:\n{text_of_rules([rule], '  ')}# This rule is not active yet; add it to a file or the console."


def _times(text: str) -> tuple[str, str]:
    """Remove the times from a sentence. Return the rest, and the times in the form of a rule, such as "for 10s"."""
    found = []
    if held := re.search(r"\bfor (?:more than |at least )?(\d+(?:\.\d+)?|an?|one|two)\s*(s|m|h)[a-z]*\b", text):
        amount = "1" if held[1] in ("a", "an") else _NUMBERS.get(held[1], held[1])
        found.append(f"for {amount}{_UNITS[held[2]]}")
        text = text[: held.start()] + text[held.end() :]
    if clock := re.search(r"\bbetween (\d\d?)(:\d\d)? and (\d\d?)(:\d\d)?", text):
        found.append(f"between {clock[1]}{clock[2] or ':00'} and {clock[3]}{clock[4] or ':00'}")
        text = text[: clock.start()] + text[clock.end() :]
    elif night := re.search(r"\b(?:at|by|during the|in the) night\b", text):
        found.append("between 22:00 and 06:00")
        text = text[: night.start()] + text[night.end() :]
    return " ".join(text.split()), " ".join(found)


def _number(word: str) -> int | None:
    return int(word) if word.isdecimal() else _NUMBERS.get(word)


def _label(text: str) -> str:
    if re.match(rf"(?:there (?:is|are) )?(?:{_PEOPLE})\b", text):
        return "person"
    words = re.match(
        r"(?:there (?:is|are) )?(?:no |an? |the |my |any )?([a-z-]+(?: (?:light|bag|ball))?)\b(?=\s|$)", text
    )
    if words is None or words[1] in ("it", "that", "this", "something"):
        raise ConfigError("the rule text does not name an object; write for example 'a person is at the door'")
    return words[1]


def _place(text: str, known: Collection[str], *, crosses: bool) -> str:
    named = [name for name in known if re.search(rf"\b{re.escape(name.lower())}\b", text)]
    if named:
        return max(named, key=len)
    found = re.search(r"\bcross(?:es|ed)? (?:the |my )?(.+)$" if crosses else rf"\b{_AT}(.+)$", text)
    if found is None and crosses:
        raise ConfigError("the rule text does not name a line; write for example 'a car crosses the gate'")
    return "" if found is None else found[1].strip()
