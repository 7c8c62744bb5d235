from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.engine import UnknownClassError
from saccade.engine.tasks.task import Vocabulary
from tests.support.engine import NANO

CLASSES = json.loads((NANO / "config.json").read_text())["classes"]
SYNONYMS = json.loads((NANO / "synonyms.json").read_text())
NANOS = Vocabulary("nano", CLASSES, SYNONYMS)
words = st.sampled_from([*CLASSES, *SYNONYMS])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("person", ["person"]),
        ("People", ["person"]),
        ("PEDESTRIANS", ["person"]),
        ("a dog", ["dog"]),
        ("the cats", ["cat"]),
        ("any vehicle", ["car", "motorcycle", "bus", "truck"]),
        ("vehicles", ["car", "motorcycle", "bus", "truck"]),
        ("buses", ["bus"]),
        ("couches", ["couch"]),
        ("puppies", ["dog"]),
        ("sheep", ["sheep"]),
        ("cell phone", ["cell phone"]),
        ("cell  phones", ["cell phone"]),
        ("cell_phone", ["cell phone"]),
        ("dining tables", ["dining table"]),
        ("truck or bus", ["truck", "bus"]),
        ("cars, dogs and cats", ["car", "dog", "cat"]),
        ("cars, dogs, and cats", ["car", "dog", "cat"]),
        ("person/face", ["person", "face"]),
        ("cat & dog; bird", ["cat", "dog", "bird"]),
        ("a man or a woman", ["person"]),
        ("pets and dogs", ["cat", "dog"]),
        ("  person  ", ["person"]),
        ("handbag", ["handbag"]),  # no 'and' at a word's edge
        ("laptop", ["laptop"]),
    ],
)
def test_what_people_type(typed: str, meant: list[str]) -> None:
    assert NANOS.resolve([typed]) == meant


def test_several_labels_keep_their_order_and_are_asked_once() -> None:
    assert NANOS.resolve(["dog", "people", "cat or dog", "person"]) == ["dog", "person", "cat"]
    assert NANOS.resolve([]) == []


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_means_itself_alone(name: str) -> None:
    assert NANOS.resolve([name]) == [name]
    assert NANOS.resolve([name.upper()]) == [name]


def test_every_synonym_means_known_classes() -> None:
    for phrase, names in SYNONYMS.items():
        assert set(names) <= set(CLASSES), phrase
        assert NANOS.resolve([phrase]) == names


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownClassError) as caught:
        NANOS.resolve(["person", "zebra"])
    assert caught.value.label == "zebra"
    message = str(caught.value)
    assert message.startswith("'zebra' is not a class of nano; other labels need a Moondream checkpoint. Classes: ")
    assert "\n" not in message
    for name in CLASSES:
        assert name in message


@pytest.mark.parametrize(
    ("typed", "hint"), [("persn", "person"), ("bicylce", "bicycle"), ("trafic light", "traffic light")]
)
def test_a_slip_of_the_finger_gets_a_hint(typed: str, hint: str) -> None:
    with pytest.raises(UnknownClassError, match=f"is not a class of nano; did you mean '{hint}'[?] Classes: "):
        NANOS.resolve([typed])


def test_the_unknown_one_of_a_list_is_the_one_named() -> None:
    with pytest.raises(UnknownClassError) as caught:
        NANOS.resolve(["cars, zebras and cats"])
    assert caught.value.label == "zebras"


@pytest.mark.parametrize("typed", ["", "   ", "or", ",", "the", "a"])
def test_a_label_without_a_name_is_refused_not_forgotten(typed: str) -> None:
    with pytest.raises(UnknownClassError):
        NANOS.resolve([typed])


@pytest.mark.parametrize("label", [5, None, ["person", "dog"]])
def test_a_label_is_one_text(label: object) -> None:
    with pytest.raises(ValueError, match="a label must be a string"):
        NANOS.resolve([label])  # type: ignore[list-item]


def test_a_class_name_wins_over_a_synonym_and_over_a_list() -> None:
    odd = Vocabulary("odd", ["salt and pepper", "salt", "glasses", "glass"], {"glass": ["salt"], "Pepper": ["salt"]})
    assert odd.resolve(["salt and pepper"]) == ["salt and pepper"]
    assert odd.resolve(["salt and glasses"]) == ["salt", "glasses"]
    assert odd.resolve(["glass"]) == ["glass"]
    assert odd.resolve(["peppers"]) == ["salt"]


@given(st.lists(words, min_size=1, max_size=6), st.sampled_from([", ", " or ", " and ", " / ", ";"]))
def test_resolving_what_was_resolved_changes_nothing(chosen: list[str], between: str) -> None:
    once = NANOS.resolve([between.join(chosen)])
    assert once == NANOS.resolve(chosen)
    assert NANOS.resolve(once) == once
    assert len(set(once)) == len(once) > 0
    assert set(once) <= set(CLASSES)


@given(st.text(max_size=30))
def test_any_text_is_resolved_or_refused(text: str) -> None:
    try:
        found = NANOS.resolve([text])
    except UnknownClassError as error:
        message = str(error)
    else:
        message = "one line"
        assert found
        assert set(found) <= set(CLASSES)
    assert len(message.splitlines()) == 1
