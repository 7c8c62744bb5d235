// Zones and lines on the frame: shown with their counts, drawn, moved, named and removed, by mouse, finger or keyboard.

import {drawChart} from "./timeline.js";
import {ask} from "./video/link.js";

const $ = (id) => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";
const COUNT_MS = 20_000;
const STEP = 0.01;  // of the frame, that an arrow key moves a corner; five times as much with Shift
const KINDS = {
  zones: {key: "polygon", name: "zone", least: 3, start: [[0.3, 0.3], [0.7, 0.3], [0.7, 0.8], [0.3, 0.8]]},
  lines: {key: "points", name: "line", least: 2, start: [[0.2, 0.6], [0.8, 0.6]]},
};

const make = (tag, properties, ...children) => {
  const one = Object.assign(document.createElement(tag), properties);
  one.append(...children);
  return one;
};

function shape(tag, attributes) {
  const one = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) one.setAttribute(name, value);
  return one;
}

const rounded = (value) => Math.round(1e4 * Math.min(1, Math.max(0, value))) / 1e4;

/** The zones and lines of the stream in view. */
export class Regions {
  #stream = null;
  #all = {zones: {}, lines: {}};
  #chosen = null;  // {kind, name}: whose corners are shown
  #drawing = null;  // {kind, points}: what is being drawn
  #counts = {zones: {}, lines: {}};
  #svg = $("shapes");
  #counting = 0;

  constructor() {
    for (const [id, kind] of [["add-zone", "zones"], ["add-line", "lines"]]) {
      // A press by key has no place on the frame: it adds a shape whose corners can be moved by keys.
      $(id).onclick = ({detail}) => (detail ? this.#begin(kind) : this.#finish(kind, KINDS[kind].start));
    }
    this.#svg.onpointerdown = (event) => this.#press(event);
    // Chromium does not know touch-action inside an SVG: a finger that drags would scroll.
    const hold = (event) => { if (this.#drawing || event.target.matches(".chosen, .corner")) event.preventDefault(); };
    this.#svg.addEventListener("touchstart", hold, {passive: false});
    $("stop-drawing").onclick = () => this.#finish(this.#drawing.kind, []);
    $("stage").addEventListener("click", ({target}) => { if (!this.#svg.contains(target)) this.#choose(null); });
    addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe($("stage"));
  }

  /** What is shown, for tests. */
  get all() { return this.#all; }

  /** Show those of a stream; nothing where the server has none to give. */
  async open(stream) {
    this.close();
    this.#stream = stream;
    try {
      const all = await (await ask(this.#path)).json();
      if (stream !== this.#stream) return;
      this.#all = all;
      $("regions").hidden = false;
    } catch {
      return;  // a server that only shows videos
    }
    this.#count();
    this.#show();
  }

  /** Show what has been counted in the last minutes, again and again while the stream is in view. */
  async #count() {
    const stream = this.#stream;
    clearTimeout(this.#counting);
    try {
      const path = `streams/${encodeURIComponent(stream)}/counts`;
      const {minutes} = await (await ask(path)).json();
      if (stream === this.#stream) drawChart($("chart"), minutes);
    } catch { /* the next time, perhaps */ }
    if (stream === this.#stream) this.#counting = setTimeout(() => this.#count(), COUNT_MS);
  }

  close() {
    clearTimeout(this.#counting);
    $("chart").hidden = true;
    this.#stream = this.#chosen = this.#drawing = null;
    this.#all = {zones: {}, lines: {}};
    this.#counts = {zones: {}, lines: {}};
    for (const id of ["regions", "drawing", "region-problem"]) $(id).hidden = true;
    this.#draw();
  }

  /** Take the counts of a record. */
  counted({zones = [], lines = []}) {
    for (const [kind, list] of [["zones", zones], ["lines", lines]]) {
      for (const one of list) this.#counts[kind][one.name] = one;
    }
    for (const [kind, regions] of Object.entries(this.#all)) {
      for (const name of Object.keys(regions)) {
        const words = this.#words(kind, name);
        for (const place of document.querySelectorAll(`[data-counts=${JSON.stringify(`${kind} ${name}`)}]`)) {
          if (place.textContent !== words) place.textContent = words;
        }
      }
    }
  }

  // ---- drawing a new one

  #begin(kind) {
    this.#chosen = null;
    this.#drawing = {kind, points: []};
    const hint = kind === "zones" ? "Click or tap the corners of the zone; select the first corner again to finish."
      : "Click or tap the start and the end of the line. A crossing to the right, seen from start to end, counts as forward.";
    $("drawing").hidden = false;
    $("drawing").querySelector("p").textContent = hint;
    $("stage").scrollIntoView({block: "nearest"});  // on a phone it is above what was pressed
    this.#draw();
  }

  #finish(kind, points) {
    this.#drawing = null;
    $("drawing").hidden = true;
    const {key, name, least} = KINDS[kind];
    if (points.length < least) return this.#draw();
    let free = name;
    for (let number = 2; free in this.#all[kind]; number++) free = `${name} ${number}`;
    this.#all[kind] = {...this.#all[kind], [free]: {[key]: points.map((point) => point.map(rounded))}};
    this.#chosen = {kind, name: free};
    this.#put();
    const input = $("region-list").querySelector(`[data-region=${JSON.stringify(`${kind} ${free}`)}] input`);
    if (matchMedia("(pointer: coarse)").matches) return;  // a keyboard would cover the frame, whose corners come next
    input?.focus();
    input?.select();
  }

  #press(event) {
    if (!this.#drawing) return;
    event.preventDefault();
    const {kind, points} = this.#drawing;
    const at = this.#at(event);
    const [first] = points;
    const {width, height} = this.#room();
    if (first && points.length > 2 && Math.hypot((at[0] - first[0]) * width, (at[1] - first[1]) * height) < 16) {
      return this.#finish(kind, points);
    }
    points.push(at);
    if (kind === "lines" && points.length === 2) return this.#finish(kind, points);
    this.#draw();
  }

  #key(event) {
    if (!this.#drawing || (event.key !== "Escape" && event.key !== "Enter")) return;
    event.preventDefault();
    this.#finish(this.#drawing.kind, event.key === "Enter" ? this.#drawing.points : []);
  }

  // ---- changing one

  #choose(chosen) {
    this.#chosen = chosen;
    this.#draw();
  }

  #points(kind, name) { return this.#all[kind][name][KINDS[kind].key]; }

  #move(kind, name, corner, at, {put}) {
    this.#points(kind, name)[corner] = at.map(rounded);
    if (put) this.#put();
    else this.#draw();
  }

  #rename(kind, name, wanted) {
    const free = wanted.trim();
    if (!free || free === name || free in this.#all[kind]) return this.#show();
    this.#all[kind] = Object.fromEntries(
      Object.entries(this.#all[kind]).map(([key, value]) => [key === name ? free : key, value]),
    );
    if (this.#chosen?.name === name) this.#chosen.name = free;
    this.#put();
  }

  #remove(kind, name) {
    const {[name]: _, ...rest} = this.#all[kind];
    this.#all[kind] = rest;
    this.#chosen = null;
    this.#put();
    $(kind === "zones" ? "add-zone" : "add-line").focus();
  }

  get #path() { return `streams/${encodeURIComponent(this.#stream)}/zones`; }

  /** Have the server take them as they are here; it says what is wrong with them. */
  async #put() {
    this.#show();
    try {
      const headers = {"Content-Type": "application/json"};
      await ask(this.#path, {method: "PUT", headers, body: JSON.stringify(this.#all)});
      this.#problem("");
    } catch (problem) {
      this.#problem(problem.message);
    }
  }

  #problem(words) {
    $("region-problem").textContent = words;
    $("region-problem").hidden = !words;
  }

  // ---- what is seen

  #words(kind, name) {
    const {exclude, classes} = this.#all[kind][name];
    if (exclude) return `ignores ${classes?.length ? classes.join(", ") : "everything"} here`;
    const counts = this.#counts[kind][name];
    if (!counts) return "";
    if (kind === "lines") return `${counts.forward} → ${counts.backward} ←`;
    return `${counts.inside} now${counts.entered === undefined ? "" : ` · ${counts.entered} in · ${counts.left} out`}`;
  }

  #show() {
    const items = Object.entries(this.#all).flatMap(([kind, regions]) => {
      return Object.keys(regions).map((name) => this.#item(kind, name));
    });
    $("region-list").replaceChildren(...items);
    this.#draw();
  }

  #item(kind, name) {
    const input = make("input", {value: name, maxLength: 60, ariaLabel: `Name of this ${KINDS[kind].name}`});
    input.onchange = () => this.#rename(kind, name, input.value);
    input.onfocus = () => this.#choose({kind, name});
    const counts = make("span", {className: "dim", textContent: this.#words(kind, name)});
    counts.dataset.counts = `${kind} ${name}`;
    const remove = make("button", {type: "button", className: "cross", textContent: "×", ariaLabel: `Remove ${name}`});
    remove.onclick = () => this.#remove(kind, name);
    const item = make("li", {}, input, counts, remove);
    item.dataset.region = `${kind} ${name}`;
    return item;
  }

  /** Where the frame is in the stage, in pixels. */
  #room() {
    const {width, height} = $("stage").getBoundingClientRect();
    const wide = Number($("stage").style.getPropertyValue("--wide")) || width / height;
    const [w, h] = width / height > wide ? [height * wide, height] : [width, width / wide];
    return {left: (width - w) / 2, top: (height - h) / 2, width: w, height: h};
  }

  /** Where a pointer is, as fractions of the frame. */
  #at({clientX, clientY}) {
    const {left, top, width, height} = this.#room();
    const stage = $("stage").getBoundingClientRect();
    return [rounded((clientX - stage.left - left) / width), rounded((clientY - stage.top - top) / height)];
  }

  #draw() {
    const focused = document.activeElement?.dataset?.corner;
    const {left, top, width, height} = this.#room();
    const drawn = (points) => points.map(([x, y]) => `${left + x * width},${top + y * height}`).join(" ");
    const parts = [];
    for (const kind of Object.keys(KINDS)) {
      for (const name of Object.keys(this.#all[kind])) parts.push(...this.#region(kind, name, drawn));
    }
    if (this.#drawing) {
      const {points} = this.#drawing;
      parts.push(shape("polyline", {class: "region chosen", points: drawn(points)}));
      for (const [x, y] of points) {
        parts.push(shape("circle", {class: "corner", cx: left + x * width, cy: top + y * height, r: 6}));
      }
    }
    this.#svg.replaceChildren(...parts);
    this.#svg.classList.toggle("drawing", Boolean(this.#drawing));
    if (focused) this.#svg.querySelector(`[data-corner=${JSON.stringify(focused)}]`)?.focus();
  }

  #region(kind, name, drawn) {
    const points = this.#points(kind, name);
    const chosen = this.#chosen?.kind === kind && this.#chosen.name === name;
    const region = shape(kind === "zones" ? "polygon" : "polyline", {
      class: `region ${kind}${chosen ? " chosen" : ""}`, points: drawn(points),
    });
    region.onpointerdown = (event) => {
      // A finger may mean to scroll: it chooses first.
      if (chosen || event.pointerType !== "touch") this.#drag(event, kind, name, null);
    };
    region.onclick = () => this.#choose({kind, name});
    const [x, y] = drawn([points[0]]).split(",").map(Number);
    const label = shape("text", {class: "region-name", x: x + 6, y: y - 8});
    label.textContent = name;
    if (!chosen) return [region, label];
    const corners = points.map((point, at) => {
      const [x, y] = drawn([point]).split(",");
      const corner = shape("circle", {
        class: "corner", cx: x, cy: y, r: 8, tabindex: 0, role: "button",
        "aria-label": `Corner ${at + 1} of ${name}: arrow keys move it`, "data-corner": `${kind} ${name} ${at}`,
      });
      corner.onpointerdown = (event) => this.#drag(event, kind, name, at);
      corner.onkeydown = (event) => this.#nudge(event, kind, name, at);
      return corner;
    });
    return [region, label, ...corners];
  }

  /** Drag a corner, or the whole of it if `corner` is null. */
  #drag(event, kind, name, corner) {
    if (this.#drawing) return;
    event.preventDefault();
    const from = this.#at(event);
    const before = this.#points(kind, name).map((point) => [...point]);
    this.#chosen = {kind, name};  // drawn with the first move: a touch whose element is gone by then is given up
    const svg = this.#svg;
    svg.setPointerCapture(event.pointerId);
    let moved = false;
    svg.onpointermove = (next) => {
      moved = true;
      const at = this.#at(next);
      if (corner !== null) return this.#move(kind, name, corner, at, {put: false});
      const limit = (axis, by) => {
        const ends = before.map((point) => point[axis]);
        return Math.min(1 - Math.max(...ends), Math.max(-Math.min(...ends), by));
      };
      const [dx, dy] = [limit(0, at[0] - from[0]), limit(1, at[1] - from[1])];
      before.forEach(([x, y], one) => { this.#points(kind, name)[one] = [rounded(x + dx), rounded(y + dy)]; });
      this.#draw();
    };
    svg.onpointerup = svg.onpointercancel = () => {
      svg.onpointermove = svg.onpointerup = svg.onpointercancel = null;
      if (moved) this.#put();
      else this.#draw();
    };
  }

  #nudge(event, kind, name, corner) {
    const [dx, dy] = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key] ?? [0, 0];
    if (event.key === "Delete" && this.#points(kind, name).length > KINDS[kind].least) {
      this.#points(kind, name).splice(corner, 1);
      return this.#put();
    }
    if (!dx && !dy) return;
    event.preventDefault();
    const step = STEP * (event.shiftKey ? 5 : 1);
    const [x, y] = this.#points(kind, name)[corner];
    this.#move(kind, name, corner, [x + dx * step, y + dy * step], {put: true});
  }
}
