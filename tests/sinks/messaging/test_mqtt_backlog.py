"""Backlog: what is published and in which order, through lost connections, compared with a simple model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from saccade.sinks.messaging import mqtt_backlog as backlog_module
from saccade.sinks.messaging.mqtt_backlog import Backlog, Item
from saccade.sinks.outbox import MAX_RECORDS

OVER = frozenset({"0", "offline"})


def drain(backlog: Backlog) -> list[tuple[str, bytes]]:
    items = []
    while (item := backlog.next()) is not None:
        backlog.published(item)
        items.append((item.topic, item.payload))
    return items


def test_state_is_published_before_events_and_records() -> None:
    backlog = Backlog(OVER)
    backlog.record("r", b"1")
    backlog.event("e", b"2")
    backlog.set("s", "3")
    assert len(backlog) == 2
    assert backlog.next() == Item("s", b"3", 1, True)
    assert drain(backlog) == [("s", b"3"), ("e", b"2"), ("r", b"1")]
    assert len(backlog) == 0


def test_only_the_last_state_is_published_and_only_once() -> None:
    backlog = Backlog(OVER)
    for payload in ("1", "2", "2"):
        backlog.set("s", payload)
    assert drain(backlog) == [("s", b"2")]
    backlog.set("s", "2")
    assert drain(backlog) == []


def test_state_that_changes_while_sent_is_published_again() -> None:
    backlog = Backlog(OVER)
    backlog.set("s", "1")
    item = backlog.next()
    assert item is not None
    backlog.set("s", "2")
    backlog.published(item)
    assert drain(backlog) == [("s", b"2")]


def test_a_new_connection_gets_all_state_that_still_holds() -> None:
    backlog = Backlog(OVER)
    backlog.set("a", "1")
    backlog.set("b", "1")
    backlog.set("b", "0")
    assert drain(backlog) == [("a", b"1"), ("b", b"0")]
    assert ("a" in backlog, "b" in backlog) == (True, False)
    backlog.refresh()
    assert drain(backlog) == [("a", b"1")]


def test_a_message_on_its_way_when_disconnected_is_repeated() -> None:
    backlog = Backlog(OVER)
    backlog.event("e", b"1")
    backlog.record("r", b"2")
    for expected in (Item("e", b"1", 1, False), Item("r", b"2", 0, False)):
        assert backlog.next() == expected
        backlog.refresh()
        item = backlog.next()
        assert item == expected
        assert item is not None
        backlog.published(item)
        backlog.record("r", b"3")
        assert backlog.next(records=False) is None


def test_a_backlog_is_bounded_and_counts_what_it_drops() -> None:
    backlog = Backlog(OVER)
    for n in range(backlog_module.MAX_EVENTS + 5):
        backlog.event("e", b"%d" % n)
    for n in range(MAX_RECORDS + 7):
        backlog.record("r", b"%d" % n)
    assert backlog.dropped == 12
    published = drain(backlog)
    assert published[0] == ("e", b"5")
    assert published[-1] == ("r", b"%d" % (MAX_RECORDS + 6))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from("abc"), st.sampled_from(["0", "1", "2"])),
        st.tuples(st.just("event"), st.just("e"), st.just("")),
        st.tuples(st.sampled_from(["publish", "lose"]), st.just(""), st.just("")),
    ),
    max_size=60,
)


@given(STEPS)
def test_a_broker_that_forgets_has_all_state_in_the_end(steps: list[tuple[str, str, str]]) -> None:
    backlog = Backlog(OVER)
    wanted: dict[str, str] = {}
    known: dict[str, str] = {}
    happened, heard = 0, []

    def publish() -> bool:
        item = backlog.next()
        if item is None:
            return False
        if item.retain:
            known[item.topic] = item.payload.decode()
        else:
            heard.append(int(item.payload))
        backlog.published(item)
        return True

    for step, topic, payload in steps:
        if step == "set":
            wanted[topic] = payload
            backlog.set(topic, payload)
        elif step == "event":
            backlog.event("e", b"%d" % happened)
            happened += 1
        elif step == "publish":
            publish()
        else:
            backlog.next()  # on its way when the connection broke
            known.clear()
            backlog.refresh()
    while publish():
        pass
    assert {t: p for t, p in known.items() if p != "0"} == {t: p for t, p in wanted.items() if p != "0"}
    assert heard == list(range(happened))
