"""Errors of a worker as they arrive at the controller."""

from __future__ import annotations

import pickle

import pytest

from saccade.engine.errors import EngineError, UnknownClassError
from saccade.pipeline.control.source_policy import NotAllowedError
from saccade.pipeline.control.worker_calls import taken, told
from saccade.pipeline.errors import AwayError, ConfigError, NotKeptError, StreamError
from saccade.pipeline.settings import PlacedError
from saccade.sinks import SinkError
from saccade.sources import SourceError


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (ConfigError("no such file"), ConfigError),
        (NotKeptError("the disk is full"), NotKeptError),
        (StreamError("taken"), StreamError),
        (AwayError("no worker is ready"), AwayError),
        (SourceError("no such file"), SourceError),
        (NotAllowedError(), NotAllowedError),
        (EngineError("no such model"), EngineError),
        (SinkError("no such folder"), SinkError),
    ],
)
def test_an_error_arrives_as_it_was_raised(raised: Exception, kind: type[Exception]) -> None:
    def call() -> None:
        raise raised

    answer = pickle.loads(pickle.dumps(told(call)))
    with pytest.raises(kind) as found:
        taken(answer)
    assert (type(found.value), str(found.value)) == (kind, str(raised))


def test_an_error_of_a_narrower_class_arrives_as_the_known_one() -> None:
    def call() -> None:
        raise UnknownClassError("bikes", "nano", ["bicycle"])

    with pytest.raises(EngineError, match="bikes"):
        taken(pickle.loads(pickle.dumps(told(call))))


def test_the_place_of_a_mistake_arrives() -> None:
    def call() -> None:
        raise PlacedError("no zone 'a'", 7, ("rules", 0, "when"))

    with pytest.raises(PlacedError) as found:
        taken(pickle.loads(pickle.dumps(told(call))))
    assert (found.value.offset, found.value.key) == (7, ("rules", 0, "when"))


def test_a_line_holds_no_password() -> None:
    def call() -> None:
        raise SourceError("rtsp://me:secret@cam/1 does not answer")

    answer = pickle.loads(pickle.dumps(told(call)))
    assert isinstance(answer, SourceError)
    assert "secret" not in str(answer)


def test_a_bug_is_no_refusal() -> None:
    def call() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        told(call)
