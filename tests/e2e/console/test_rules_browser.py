"""The console beside the video, in a real browser: rules, questions, windows, the heatmap, events, a finger."""

from __future__ import annotations

import itertools
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from saccade.pipeline.config.file import load
from tests.e2e.console.conftest import Console
from tests.e2e.console.test_console_browser import violations
from tests.e2e.console.test_demo_browser import SEEN, press, words
from tests.support.browser import Tab, needs_chromium, tab
from tests.support.webrtc import until

pytestmark = [pytest.mark.e2e, needs_chromium]

TEXT = "document.getElementById('rule-text')"


@pytest.fixture(scope="module")
def browser(console: Console, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab("about:blank", tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Tab, console: Console) -> Tab:
    """The page on the stream, once its rules are there."""
    browser.do("Page.navigate", url="about:blank")
    browser.shape(1440, 900)
    browser.do("Page.navigate", url=f"{console.url}#/stream/hall")
    browser.until("window.saccade && document.getElementById('rules').checkVisibility()")
    browser.console.clear()
    return browser


def rules(console: Console) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{console.url}streams/hall/rules") as response:
        found: list[dict[str, Any]] = json.load(response)["rules"]
    return found


def write(page: Tab, text: str) -> None:
    page.eval(f"{TEXT}.value = {text!r}; {TEXT}.dispatchEvent(new Event('input'))")


def test_rules_are_written_and_saved_to_the_file(page: Tab, console: Console) -> None:
    page.until("!!document.querySelector('#rule-list [data-rule=visitor] i.ok')", seconds=25)  # an event goes on
    assert "now" in words(page, "[data-rule=visitor]")
    press(page, "#add-rule")
    page.until(f"document.activeElement === {TEXT}")
    begun = "- name: visitor\n  when: person in desk\n- name: rule\n  when: person for 2s\n"
    assert page.eval(f"{TEXT}.value") == begun
    write(page, begun.replace("person for 2s", "persn in hall"))
    page.until("document.getElementById('rule-mistake').checkVisibility()")
    assert "Line 4, column 18" in words(page, "#rule-mistake")
    assert "no zone 'hall'" in words(page, "#rule-mistake")
    assert page.eval("document.querySelector('.line.bad mark').textContent") == "hall"
    assert violations(page) == []
    press(page, "#apply-rules")  # is refused, and nothing is lost
    page.until("document.getElementById('rule-mistake').checkVisibility()")
    assert len(rules(console)) == 1
    press(page, "#rule-mistake")  # leads to the place
    assert page.eval(f"{TEXT}.value.slice({TEXT}.selectionStart, {TEXT}.selectionEnd)") == "hall"
    write(page, begun.replace("person for 2s", "count of person in desk > 5"))
    page.until("!document.getElementById('rule-mistake').checkVisibility()")
    press(page, "#apply-rules")
    page.until("!!document.querySelector('#rule-list [data-rule=rule]')")
    assert not page.eval("document.getElementById('rule-editor').checkVisibility()")
    press(page, "#save")
    until(lambda: "count of person" in console.path.read_text())
    text = console.path.read_text()
    assert [one in text for one in ("# The shop.", "# who is there", "# anyone", "# over the")] == [True] * 4
    assert [rule.name for rule in load(console.path, {}).streams[0].rules] == ["visitor", "rule"]
    press(page, "[data-rule=rule] .cross")
    until(lambda: [one["name"] for one in rules(console)] == ["visitor"])
    page.until("!document.querySelector('#rule-list [data-rule=rule]')")


def test_a_rule_that_asks_shows_p_yes_as_it_comes(page: Tab, console: Console) -> None:
    press(page, "#edit-rules")
    page.until(f"{TEXT}.value.includes('visitor')")
    asking = "- name: hat\n  when: person\n  ask: Is there a hat?\n  threshold: {on: 1, off: 0}\n  again: 500ms\n"
    write(page, "- name: visitor\n  when: person in desk\n" + asking)
    press(page, "#apply-rules")
    page.until("/^\\d+%$/.test(document.querySelector('[data-rule=hat] output')?.textContent)", seconds=25)
    assert "Is there a hat?" in words(page, "[data-rule=hat]")
    bar = page.eval("document.querySelector('[data-rule=hat] .bar').getAttribute('aria-label')")
    assert bar.endswith("An event begins at 100% and ends at 0%.")
    assert violations(page) == []
    press(page, "[data-rule=hat] .cross")
    until(lambda: [one["name"] for one in rules(console)] == ["visitor"])


def test_a_question_about_the_frame_is_answered_in_pieces(page: Tab) -> None:
    page.until(f"{SEEN}?.objects", seconds=25)
    page.eval("""window.pieces = [];
        new MutationObserver(() => pieces.push(document.getElementById('answer-text').textContent))
            .observe(document.getElementById('answer-text'), {childList: true, characterData: true, subtree: true});
        document.getElementById('question').value = 'What is happening?'; 0""")
    press(page, "#ask .send")
    page.until("document.getElementById('answer').ariaBusy === 'true'")
    page.until("document.getElementById('answer').ariaBusy === 'false'", seconds=60)
    pieces = page.eval("pieces")
    assert len(set(pieces)) > 5  # it grew, piece by piece
    assert all(after.startswith(before) for before, after in itertools.pairwise(pieces[1:]))
    assert page.eval("document.getElementById('asked-frame').naturalWidth") == 640
    assert violations(page) == []
    assert page.console == []
    page.eval("location.hash = '#/wall'")
    page.until("document.getElementById('answer').hidden")  # it was about another frame


def change(console: Console, **values: str) -> None:
    request = urllib.request.Request(
        f"{console.url}streams/hall",
        json.dumps(values).encode(),
        {"Content-Type": "application/json"},
        method="PATCH",
    )
    urllib.request.urlopen(request).close()


def test_the_windows_that_were_looked_at_are_drawn_on_demand(page: Tab, console: Console) -> None:
    page.until(f"{SEEN}?.objects", seconds=25)
    assert not page.eval("document.getElementById('windows').checkVisibility()")  # there are none
    change(console, saccades="1")
    try:
        page.until("document.getElementById('windows').checkVisibility()", seconds=25)
        assert page.eval(f"{SEEN}.looks ?? null") is None
        press(page, "#windows")
        page.until(f"{SEEN}?.looks?.length > 0", seconds=25)
        x1, y1, x2, y2 = page.eval(f"{SEEN}.looks[0].box_norm")
        assert 0 <= x1 < x2 <= 1
        assert 0 <= y1 < y2 <= 1
        assert violations(page) == []
    finally:
        change(console, saccades="0")
    press(page, "#windows")
    page.until(f"{SEEN} && !{SEEN}.looks")


def test_the_heatmap_is_laid_over_the_frame(page: Tab) -> None:
    page.until(f"{SEEN}?.objects", seconds=25)
    press(page, "#heat")
    page.until("document.getElementById('heatmap').naturalWidth === 320")
    assert page.eval("document.getElementById('heat').ariaPressed") == "true"
    opaque = page.eval("""(() => {
        const image = document.getElementById('heatmap'), canvas = new OffscreenCanvas(320, 180);
        const context = canvas.getContext('2d');
        context.drawImage(image, 0, 0);
        const {data} = context.getImageData(0, 0, 320, 180);
        return data.filter((_, at) => at % 4 === 3 && data[at] > 100).length;
    })()""")
    assert 0 < opaque < 320 * 180 / 2  # there where people were, and not everywhere
    assert violations(page) == []
    page.eval("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'h', bubbles: true}))")
    page.until("!document.getElementById('heatmap').checkVisibility()")


def test_events_are_filtered_and_found_by_what_is_seen(page: Tab, console: Console) -> None:
    store = console.opened.controller.local.store
    until(lambda: bool(store and list(store.media_folder.glob("*.jpg"))), seconds=30)
    page.eval("location.hash = '#/events'")
    page.until("document.querySelectorAll('#event-list li').length > 0")
    page.until("document.querySelectorAll('#event-rule option').length > 1")
    page.eval("""document.getElementById('event-rule').value = 'visitor';
        document.getElementById('event-rule').onchange()""")
    page.until("document.querySelectorAll('#event-list li').length > 0")
    assert page.eval("[...document.querySelectorAll('#event-list b')].every((one) => one.textContent === 'visitor')")
    press(page, "[name=how][value=images]")
    page.eval("""document.getElementById('event-words').value = 'a person with a hat';
        document.getElementById('event-filters').requestSubmit()""")
    page.until("!!document.querySelector('#event-list .match')", seconds=60)
    page.until("document.getElementById('event-note').innerText.includes('Best matches first')")
    assert page.eval("/^\\d+%$/.test(document.querySelector('#event-list .match').textContent)")
    assert violations(page) == []


def test_zones_are_drawn_and_moved_by_a_finger(page: Tab, console: Console) -> None:
    def zones() -> dict[str, Any]:
        with urllib.request.urlopen(f"{console.url}streams/hall/zones") as response:
            found: dict[str, Any] = json.load(response)["zones"]
        return found

    def touch(kind: str, *at: float) -> None:
        points = [{"x": at[0], "y": at[1]}] if at else []
        page.do("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=points)

    def place(x: float, y: float) -> tuple[float, float]:
        room = json.loads(page.eval("JSON.stringify(document.getElementById('stage').getBoundingClientRect())"))
        return room["x"] + x * room["width"], room["y"] + y * room["height"]

    def tap(*at: float) -> None:
        touch("Start", *at)
        touch("End")

    page.shape(390, 844, phone=True)
    page.do("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        page.until(f"{SEEN}?.objects", seconds=25)
        page.eval("document.getElementById('add-zone').scrollIntoView({block: 'center'})")
        button = json.loads(page.eval("JSON.stringify(document.getElementById('add-zone').getBoundingClientRect())"))
        tap(button["x"] + 20, button["y"] + 20)
        page.until("document.getElementById('shapes').matches('.drawing')")
        page.until("document.getElementById('stage').getBoundingClientRect().top > -1")  # the frame is in view
        for corner in ((0.2, 0.2), (0.8, 0.2), (0.8, 0.9), (0.2, 0.2)):  # the first again ends it
            tap(*place(*corner))
        until(lambda: "zone" in zones())
        assert zones()["zone"]["polygon"] == [
            pytest.approx([x, y], abs=0.02) for x, y in ((0.2, 0.2), (0.8, 0.2), (0.8, 0.9))
        ]
        touch("Start", *place(0.8, 0.9))
        for y in (0.8, 0.7, 0.6):
            touch("Move", *place(0.7, y))
        touch("End")
        until(lambda: zones()["zone"]["polygon"][2] == pytest.approx([0.7, 0.6], abs=0.02))
        assert page.eval("document.getElementById('stage').getBoundingClientRect().top > -1")  # nothing was scrolled
        assert page.eval("document.querySelector('[data-corner]').getBoundingClientRect().width") >= 24  # for a finger
        press(page, "#region-list [data-region='zones zone'] .cross")
        until(lambda: "zone" not in zones())
    finally:
        page.do("Emulation.setTouchEmulationEnabled", enabled=False)
