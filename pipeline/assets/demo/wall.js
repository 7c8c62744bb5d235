// All streams at a glance: live video with the boxes in it, state, counts and rate; one press leads to one stream.

import {timeOf} from "./timeline.js";
import {Link} from "./video/link.js";

const WIDTH = 480;  // of a tile's video, in pixels
const make = (tag, properties, ...children) => {
  const one = Object.assign(document.createElement(tag), properties);
  one.append(...children);
  return one;
};
const place = (name) => `#/stream/${encodeURIComponent(name)}`;

/** A stream in a list: its light, its name, and its state for those who want to know. */
export function streamButton({name, ok, state, reason}) {
  const light = make("i", {className: ok ? "ok" : "", ariaHidden: "true"});
  const words = make("span", {className: "dim", textContent: ok ? state : reason ?? state});
  return make("li", {}, make("a", {className: "plain", href: place(name)}, light, make("b", {textContent: name}), words));
}

/** One stream. Connects while it is on the screen. */
class Tile {
  #name; #color; #link = null; #stream = null; #counts = ""; #lost = false;
  #video = make("video", {muted: true, autoplay: true, playsInline: true, tabIndex: -1});
  #light = make("i", {ariaHidden: "true"});
  #found = make("span", {className: "found"});
  #note = make("span", {className: "dim note"});
  #cover = make("span", {className: "cover"});
  #event = make("span", {className: "dim event"});

  constructor(name, color) {
    this.#name = name;
    this.#color = color;
    const title = make("span", {className: "title"}, this.#light, make("b", {textContent: name}), this.#found, this.#note);
    const frame = make("span", {className: "frame"}, this.#video, this.#cover);
    this.item = make("li", {}, make("a", {className: "tile", href: place(name)}, frame, title, this.#event));
    this.item.dataset.stream = name;
    this.#video.onplaying = () => { this.#cover.textContent = ""; };
  }

  /** Show how the stream is doing, as the server lists it. */
  update(stream, event) {
    this.#stream = stream;
    this.#event.textContent = event ? `${event.rule} · ${timeOf(event)}` : "";
    this.#light.className = stream.ok ? "ok" : "";
    const rate = stream.fps === undefined ? stream.state : `${stream.fps.toFixed(0)} fps`;
    this.#note.textContent = stream.ok ? rate : stream.state;
    this.#explain();
  }

  set live(wanted) {
    if (wanted === Boolean(this.#link)) return;
    this.#link?.close();
    this.#link = wanted ? new Link(`whep/${encodeURIComponent(this.#name)}?width=${WIDTH}`, null, this) : null;
    if (wanted) return;
    this.#video.srcObject = null;
    this.#video.removeAttribute("src");
  }

  // ---- what the link reports

  state(kind) {
    this.#lost = kind !== "live";
    this.#explain();
  }

  open() {}

  media(attach) {
    attach(this.#video);
    this.#video.play().catch(() => {});
  }

  received({objects, points}) {
    if (!objects) return;
    const counts = new Map();
    for (const {label} of [...objects, ...points]) counts.set(label, (counts.get(label) ?? 0) + 1);
    const words = [...counts].sort().map(([label, count]) => `${count} ${label}`).join(", ");
    if (words === this.#counts) return;
    this.#counts = words;
    this.#found.replaceChildren(...[...counts].sort().map(([label, count]) => {
      const chip = make("span", {className: "chip", textContent: `${count} ${label}`});
      chip.style.setProperty("--chip", this.#color(label));
      return chip;
    }));
  }

  #explain() {
    const {ok, state, reason, detail} = this.#stream ?? {};
    if (this.#stream && !ok) this.#cover.textContent = [reason ?? state, detail].filter(Boolean).join(": ");
    else if (this.#lost) this.#cover.textContent = "connecting…";
    else this.#cover.textContent = "";
  }
}

/** The tiles in `list`, as many as there are streams. */
export class Wall {
  #list; #color; #tiles = new Map(); #shown = false; #visible = new Set();
  #watcher = new IntersectionObserver((entries) => {
    for (const {target, isIntersecting} of entries) {
      if (isIntersecting) this.#visible.add(target.dataset.stream);
      else this.#visible.delete(target.dataset.stream);
    }
    this.#connect();
  });

  constructor(list, color) {
    this.#list = list;
    this.#color = color;
    document.addEventListener("visibilitychange", () => this.#connect());
    addEventListener("pagehide", () => { this.shown = false; });
  }

  set shown(shown) {
    this.#shown = shown;
    this.#connect();
  }

  get shown() { return this.#shown; }

  /** @param events - the newest first */
  update(streams, events) {
    const names = new Set(streams.map(({name}) => name));
    for (const [name, tile] of this.#tiles) {
      if (names.has(name)) continue;
      tile.live = false;
      this.#watcher.unobserve(tile.item);
      this.#visible.delete(name);
      tile.item.remove();
      this.#tiles.delete(name);
    }
    for (const stream of streams) {
      if (!this.#tiles.has(stream.name)) {
        const tile = new Tile(stream.name, this.#color);
        this.#tiles.set(stream.name, tile);
        this.#list.append(tile.item);
        this.#watcher.observe(tile.item);
      }
      this.#tiles.get(stream.name).update(stream, events.find((event) => event.stream === stream.name));
    }
    const columns = Math.ceil(Math.sqrt(this.#tiles.size));
    this.#list.style.setProperty("--columns", columns);
    this.#list.style.setProperty("--rows", Math.ceil(this.#tiles.size / columns));
    document.getElementById("no-tiles").hidden = this.#tiles.size > 0;
  }

  #connect() {
    const on = this.#shown && !document.hidden;
    for (const [name, tile] of this.#tiles) tile.live = on && this.#visible.has(name);
  }
}
