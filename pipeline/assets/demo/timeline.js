// What has happened: stored events by stream, rule and words, each with its image and its clip.

import {ask} from "./video/link.js";

const $ = (id) => document.getElementById(id);
const MOST = 24;  // events at a time
const LIST_MS = 5000;

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
  const length = seconds === null ? "going on" : seconds < 60 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
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
    for (const id of ["event-stream", "event-since"]) $(id).onchange = () => this.#search();
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
    if (shown) this.#search();
    else if ($("player").open) $("player").close();
  }

  /** The streams that can be chosen. */
  set streams(names) {
    const select = $("event-stream");
    if ([...select.options].slice(1).map(({value}) => value).join("\n") === names.join("\n")) return;
    const chosen = select.value;
    const all = make("option", {value: "", textContent: "All streams"});
    select.replaceChildren(all, ...names.map((name) => make("option", {value: name, textContent: name})));
    select.value = names.includes(chosen) ? chosen : "";
  }

  #query(after) {
    const query = new URLSearchParams({limit: MOST});
    if ($("event-stream").value) query.set("stream", $("event-stream").value);
    if ($("event-since").value) query.set("since", $("event-since").value);
    if ($("event-words").value.trim()) query.set("q", $("event-words").value.trim());
    if (after) query.set("after", after);
    return `events?${query}`;
  }

  async #search() {
    this.#after = null;
    await this.#load(false);
  }

  async #refresh() {
    if (!this.#shown || document.hidden || this.#after || $("player").open) return;
    await this.#load(false);
  }

  async #load(more) {
    const asked = ++this.#asked;
    try {
      const {events, after} = await (await ask(this.#query(more ? this.#after : null))).json();
      if (asked !== this.#asked) return;
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
      $("no-events").textContent = "Nothing has happened that these filters let through.";
    } catch (problem) {
      $("no-events").hidden = false;
      $("no-events").textContent = problem.message;
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
    const words = `${event.stream} · ${timeOf(event)}`;
    const button = make("button", {type: "button", className: "tile"}, frame, title,
      make("span", {className: "dim when", textContent: words}));
    button.onclick = () => this.#play(event);
    return make("li", {}, button);
  }

  async #play(event) {
    $("player-title").textContent = `${event.rule}: ${event.label}, ${event.stream}, ${timeOf(event)}`;
    const answers = Object.entries(event.answers ?? {}).map(([asked, answer]) => `${asked} ${answer}`);
    $("player-words").textContent = answers.join(" · ");
    const video = $("player-video");
    video.hidden = !event.clip;
    $("player").showModal();
    if (!event.clip) {
      $("player-words").textContent = [...answers, "There is no clip of it, or not yet."].join(" · ");
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

/** Bars of what was counted in each of the last minutes, in a figure's SVG. */
export function drawChart(figure, minutes, most = 60) {
  const totals = minutes.slice(-most).map(({objects}) => Object.values(objects ?? {}).reduce((sum, one) => sum + one, 0));
  figure.hidden = !totals.some((total) => total > 0);
  if (figure.hidden) return;
  const top = Math.max(...totals);
  const svg = figure.querySelector("svg");
  svg.setAttribute("viewBox", `0 0 ${most} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-label", `Objects that came in each of the last ${totals.length} minutes: ${totals.join(", ")}`);
  svg.replaceChildren(...totals.map((total, at) => {
    const bar = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    const height = total ? Math.max(1, 20 * total / top) : 0.3;
    const place = {x: most - totals.length + at + 0.1, y: 20 - height, width: 0.8, height};
    for (const [name, value] of Object.entries(place)) bar.setAttribute(name, value);
    return bar;
  }));
  figure.querySelector("figcaption").textContent = `New objects a minute, at most ${top}`;
}
