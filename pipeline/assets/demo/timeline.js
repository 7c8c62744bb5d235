// What has happened: stored events by stream, rule and words, or by what a model sees in their images; with their clips.

import {ask} from "./video/link.js";

const $ = (id) => document.getElementById(id);
const MOST = 24;  // events at a time
const LIST_MS = 5000;
const ASKED_MS = 120_000;  // that the model may take for a search
const HINTS = {words: "search labels, rules and answers…", images: "describe what to find, such as a person…"};

const make = (tag, properties, ...children) => {
  const one = Object.assign(document.createElement(tag), properties);
  one.append(...children);
  return one;
};

const clock = new Intl.DateTimeFormat([], {hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false});
const day = new Intl.DateTimeFormat([], {weekday: "short", day: "numeric", month: "short"});

/** When an event was, and for how long, in words. */
export function timeOf({start_time: start, end_time: end, capture_clock: how}) {
  const seconds = end === null ? null : Math.round(end - start);
  const length = seconds === null ? "ongoing" : seconds < 60 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
  if (how === "file") return `at ${start.toFixed(1)} s · ${length}`;
  const date = new Date(1000 * start);
  const today = date.toDateString() === new Date().toDateString();
  return `${today ? "" : `${day.format(date)} `}${clock.format(date)} · ${length}`;
}

/** A file behind the token, as an address that an image or a video can have. */
async function fileOf(path) {
  return URL.createObjectURL(await (await ask(path)).blob());
}

/** The view of events. */
export class Timeline {
  #shown = false;
  #after = null;
  #asked = 0;
  #newest = "";
  #color;

  constructor(color) {
    this.#color = color;
    for (const id of ["event-stream", "event-rule", "event-since"]) $(id).onchange = () => this.#search();
    for (const input of document.querySelectorAll("[name=how]")) {
      input.onchange = () => {
        this.#hint();
        if ($("event-words").value.trim()) this.#search();
      };
    }
    this.#hint();
    $("event-words").oninput = () => { if (!$("event-words").value) this.#search(); };
    $("event-filters").onsubmit = (event) => {
      event.preventDefault();
      this.#search();
    };
    $("player").onclose = () => $("player-video").removeAttribute("src");
    $("close-player").onclick = () => $("player").close();
    setInterval(() => this.#refresh(), LIST_MS);
  }

  set shown(shown) {
    this.#shown = shown;
    if (shown) {
      this.#search();
      this.#listRules();
    } else if ($("player").open) $("player").close();
  }

  /** The streams that can be chosen. */
  set streams(names) {
    offer($("event-stream"), names);
  }

  async #listRules() {
    try {
      offer($("event-rule"), (await (await ask("events/rules")).json()).rules);
    } catch { /* then by streams and words only */ }
  }

  #hint() { $("event-words").placeholder = HINTS[document.querySelector("[name=how]:checked").value]; }

  /** Whether the model is asked about images. */
  get #asks() {
    return document.querySelector("[name=how]:checked").value === "images" && $("event-words").value.trim() !== "";
  }

  #query(after) {
    const query = new URLSearchParams({limit: MOST});
    for (const name of ["stream", "rule", "since"]) {
      if ($(`event-${name}`).value) query.set(name, $(`event-${name}`).value);
    }
    if ($("event-words").value.trim()) query.set("q", $("event-words").value.trim());
    if (after) query.set("after", after);
    return `events${this.#asks ? "/search" : ""}?${query}`;
  }

  async #search() {
    this.#after = null;
    this.#newest = "";
    await this.#load(false);
  }

  async #refresh() {
    if (!this.#shown || document.hidden || this.#after || this.#asks || $("player").open) return;
    this.#listRules();
    await this.#load(false);
  }

  async #load(more) {
    const asked = ++this.#asked;
    const asks = this.#asks;
    note(asks ? "The model checks the images of up to 50 events…" : "");
    try {
      const response = await ask(this.#query(more ? this.#after : null), asks ? {signal: AbortSignal.timeout(ASKED_MS)} : {});
      const {events, after} = await response.json();
      if (asked !== this.#asked) return;
      note(asks && events.length ? "Best matches first." : "");
      const seen = JSON.stringify(events.map(({id, end_time: end, snapshot, clip}) => [id, end, snapshot, clip]));
      if (!more && seen === this.#newest) return;
      if (!more) this.#newest = seen;
      const cards = events.map((event) => this.#card(event));
      if (more) $("event-list").append(...cards);
      else $("event-list").replaceChildren(...cards);
      $("more-events").hidden = !after;
      $("more-events").onclick = () => {
        this.#after = after;
        this.#load(true);
      };
      $("no-events").hidden = $("event-list").children.length > 0;
      $("no-events").textContent = "No events match these filters.";
    } catch (problem) {
      if (asked !== this.#asked) return;
      note("");
      if (!more) $("event-list").replaceChildren();
      $("more-events").hidden = true;
      $("no-events").hidden = false;
      $("no-events").textContent = problem.message;
      this.#newest = "";
    }
  }

  #card(event) {
    const frame = make("span", {className: "frame"});
    const image = make("img", {alt: "", loading: "lazy"});
    frame.append(image);
    if (event.snapshot) {
      fileOf(`events/${encodeURIComponent(event.id)}/snapshot.jpg`).then((url) => { image.src = url; }, () => {});
    }
    const chip = make("span", {className: "chip", textContent: event.label});
    chip.style.setProperty("--chip", this.#color(event.label));
    const title = make("span", {className: "title"}, chip, make("b", {textContent: event.rule}));
    if (event.match !== undefined) {
      title.append(make("span", {className: "match", textContent: `${Math.round(100 * event.match)}%`, title: "Probability that the image matches the search"}));
    }
    const words = `${event.stream} · ${timeOf(event)}`;
    const button = make("button", {type: "button", className: "tile"}, frame, title,
      make("span", {className: "dim when", textContent: words}));
    button.onclick = () => this.#play(event);
    return make("li", {}, button);
  }

  /** The thumb: whether the event is a false alarm, and a click that changes it. */
  async #showVerdict({id}) {
    const thumb = $("false-alarm"), path = `events/${encodeURIComponent(id)}`;
    thumb.hidden = true;
    const show = ({false_alarm: wrong = false, held_back: held = 0}) => {
      if ($("player").dataset.event !== id) return;
      thumb.setAttribute("aria-pressed", wrong);
      thumb.querySelector("span").textContent = wrong ? `False alarm · ${held} suppressed` : "False alarm";
      thumb.hidden = false;
    };
    const read = async () => show(await (await ask(path)).json());
    $("player").dataset.event = id;
    thumb.onclick = async () => {
      const body = JSON.stringify({false_alarm: thumb.getAttribute("aria-pressed") !== "true"});
      try {
        await ask(`${path}/verdict`, {method: "POST", body, headers: {"Content-Type": "application/json"}});
        await read();
      } catch (problem) {
        $("player-words").textContent = problem.message;
      }
    };
    await read().catch(() => {});
  }

  async #play(event) {
    $("player-title").textContent = `${event.rule}: ${event.label}, ${event.stream}, ${timeOf(event)}`;
    const answers = Object.entries(event.answers ?? {}).map(([asked, answer]) => `${asked} ${answer}`);
    $("player-words").textContent = answers.join(" · ");
    this.#showVerdict(event);
    const there = $("player-recording");
    there.hidden = document.querySelector("[data-view=recording]").hidden || event.capture_clock === "file";
    there.href = `#/recording/${encodeURIComponent(event.stream)}/${(event.start_time - 5).toFixed(1)}`;
    const video = $("player-video");
    video.hidden = !event.clip;
    $("player").showModal();
    if (!event.clip) {
      const why = "This event has no clip. Files played in a loop or in real time have snapshots only.";
      $("player-words").textContent = [...answers, why].join(" · ");
      return;
    }
    try {
      video.src = await fileOf(`events/${encodeURIComponent(event.id)}/clip.mp4`);
      await video.play();
    } catch (problem) {
      $("player-words").textContent = problem.message;
    }
  }
}

/** What is going on with the list; nothing if "". */
function note(words) {
  $("event-note").textContent = words;
  $("event-note").hidden = !words;
}

/** Have these names, or all, chosen in a list. */
function offer(select, names) {
  if ([...select.options].slice(1).map(({value}) => value).join("\n") === names.join("\n")) return;
  const chosen = select.value;
  const options = names.map((name) => make("option", {value: name, textContent: name}));
  select.replaceChildren(select.options[0], ...options);
  select.value = names.includes(chosen) ? chosen : "";
}

/** Bars of what was counted in each of the last minutes, in a figure's SVG. */
export function drawChart(figure, minutes, most = 60) {
  const totals = minutes.slice(-most).map(({objects}) => Object.values(objects ?? {}).reduce((sum, one) => sum + one, 0));
  figure.hidden = !totals.some((total) => total > 0);
  if (figure.hidden) return;
  const top = Math.max(...totals);
  const svg = figure.querySelector("svg");
  svg.setAttribute("viewBox", `0 0 ${most} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-label", `New objects in each of the last ${totals.length} minutes: ${totals.join(", ")}`);
  svg.replaceChildren(...totals.map((total, at) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const height = total ? Math.max(1, 20 * total / top) : 0.3;
    const place = {x: most - totals.length + at + 0.1, y: 20 - height, width: 0.8, height};
    for (const [name, value] of Object.entries(place)) bar.setAttribute(name, value);
    return bar;
  }));
  figure.querySelector("figcaption").textContent = `New objects per minute, last hour · maximum ${top}`;
}
