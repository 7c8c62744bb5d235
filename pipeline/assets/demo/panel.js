// What stands beside the frame: what to find, what was found, and how long it took.

import {ask} from "./link.js";

const $ = (id) => document.getElementById(id);
const FIRST = ["person", "face", "cat", "dog", "car", "bicycle", "cup", "cell phone", "laptop", "chair", "bottle"];
const IDEAS = 6;
const PARTS = ["network and video", "queue", "prefill", "decode"];
const PLAIN = "#c9d1e0";

const make = (tag, properties) => Object.assign(document.createElement(tag), properties);

/** What to find: chips, points or boxes, and how sure the model must be. Calls `changed` after each change of them. */
export class Prompts {
  #names = [];
  #colors = new Map();
  #classes = null;
  #changed;

  constructor(model, changed) {
    this.#changed = changed;
    this.#classes = model.classes;
    this.take(model.prompts, model.colors);
    $("names").replaceChildren(...(this.#classes ?? []).map((value) => make("option", {value})));
    $("all").hidden = !this.#classes;
    $("all").querySelector("summary").textContent = `Everything ${model.model} knows (${this.#classes?.length})`;
    for (const input of document.querySelectorAll("[name=skill]")) {
      input.disabled = !model.skills.includes(input.value);
      input.onchange = () => this.#changed();
    }
    $("conf").oninput = () => { $("conf-shown").textContent = `${$("conf").value}%`; };
    $("conf").onchange = () => this.#changed();
    $("find").onsubmit = (event) => {
      event.preventDefault();
      this.add($("name").value);
    };
    $("name").oninput = ({inputType}) => {
      this.#warn("");
      if (!inputType || inputType === "insertReplacementText") this.add($("name").value);  // taken from the list
    };
    $("name").onkeydown = ({key}) => {
      if (key === "Backspace" && !$("name").value && this.#names.length > 1) this.#remove(this.#names.at(-1));
    };
  }

  /** As the server wants them. */
  get wanted() {
    const skill = document.querySelector("[name=skill]:checked").value;
    return {detect: [], point: [], [skill]: this.#names, conf: Number($("conf").value) / 100};
  }

  color = (label) => this.#colors.get(label) ?? PLAIN;

  /** Whether a label is looked for now; what is still on its way for an old name is not shown. */
  has = (label) => this.#names.includes(label);

  /** Show the prompts that the server reports. */
  take(prompts, colors) {
    for (const [label, color] of Object.entries(colors)) this.#colors.set(label, color);
    this.#names = [...new Set([...prompts.detect, ...prompts.point])];
    const skill = prompts.point.length && !prompts.detect.length ? "point" : "detect";
    document.querySelector(`[name=skill][value=${skill}]`).checked = true;
    $("conf").value = Math.round(100 * prompts.conf);
    $("conf-shown").textContent = `${$("conf").value}%`;
    this.#show();
  }

  /** Look for one more thing, as a person calls it. */
  async add(phrase) {
    if (!phrase.trim()) return;
    try {
      const response = await ask(`names?of=${encodeURIComponent(phrase)}`);
      const {names, colors, error} = await response.json();
      if (error) return this.#warn(error);
      for (const [label, color] of Object.entries(colors)) this.#colors.set(label, color);
      this.#names = [...new Set([...this.#names, ...names])];
    } catch (problem) {
      return this.#warn(problem.message);
    }
    $("name").value = "";
    this.#warn("");
    this.#show();
    this.#changed();
  }

  /** Show what is wrong with a name; nothing if "". */
  #warn(words) {
    $("unknown").hidden = !words;
    const [wrong, known] = words.split(/ (?=It knows: )/);  // the list is long, and no reproach
    $("unknown").replaceChildren(make("b", {textContent: wrong}), known ?? "");
  }

  refuse(words) { this.#warn(words); }

  #remove(name) {
    if (this.#names.length === 1) return this.#warn("At least one name is needed: add another first.");
    this.#names = this.#names.filter((one) => one !== name);
    this.#warn("");
    this.#show();
    this.#changed();
  }

  #show() {
    $("chips").replaceChildren(...this.#names.map((name) => {
      const chip = document.createElement("li");
      const text = make("span", {textContent: name});
      const cross = make("button", {type: "button", textContent: "×"});
      cross.setAttribute("aria-label", `Do not look for ${name}`);
      cross.onclick = () => {
        this.#remove(name);
        $("name").focus();
      };
      chip.style.setProperty("--chip", this.color(name));
      chip.append(text, cross);
      return chip;
    }));
    const others = (this.#classes ?? []).filter((name) => !this.#names.includes(name));
    const common = FIRST.filter((name) => others.includes(name)).slice(0, IDEAS);
    $("ideas").replaceChildren(...common.map((name) => this.#idea(name)));
    $("all").querySelector("div").replaceChildren(...others.map((name) => this.#idea(name)));
  }

  #idea(name) {
    const button = make("button", {type: "button", textContent: name});
    button.onclick = () => this.add(name);
    return button;
  }
}

/** What was found, and how long it took, of the last second or two. */
export class Figures {
  #times = [];
  #means = null;
  #announced = "";
  #announcedAt = 0;
  #shownAt = 0;

  /**
   * @param seen - {objects, points, answers} as they are shown
   * @param latency - of the record, in ms
   * @param network - ms that were not spent in the server
   */
  note(seen, latency, network, color) {
    const now = performance.now();
    this.#times = [...this.#times.filter((time) => now - time < 2000), now];
    const parts = [network + latency.decode, latency.queue, latency.prefill, latency.decode_tokens];
    this.#means = (this.#means ?? parts).map((mean, part) => mean + 0.15 * (parts[part] - mean));
    if (now - this.#shownAt < 200) return;  // five times a second is enough to read
    this.#shownAt = now;
    this.#showFound(seen, color);
    this.#showSpeed();
  }

  clear() {
    [this.#times, this.#means] = [[], null];
    $("found").replaceChildren(make("li", {className: "dim", textContent: "nothing yet"}));
    for (const place of [$("total"), $("rate"), ...document.querySelectorAll("#parts dd")]) place.textContent = "–";
    for (const part of document.querySelectorAll("#split i")) part.style.width = 0;
  }

  #showFound({objects, points, answers}, color) {
    const found = new Map();
    for (const {label, score} of [...objects, ...points]) {
      const {count, best} = found.get(label) ?? {count: 0, best: 0};
      found.set(label, {count: count + 1, best: Math.max(best, score)});
    }
    const lines = [...found].sort().map(([label, {count, best}]) => {
      const line = document.createElement("li");
      line.style.setProperty("--chip", color(label));
      const name = make("b", {textContent: count > 1 ? `${count} × ${label}` : label});
      const score = make("span", {textContent: `${Math.round(100 * best)}%`});
      line.append(document.createElement("i"), name, score);
      return line;
    });
    for (const {prompt, text} of answers ?? []) {
      lines.push(make("li", {className: "answer", textContent: `${prompt} ${text}`}));
    }
    const none = make("li", {className: "dim", textContent: "nothing in this frame"});
    $("found").replaceChildren(...(lines.length ? lines : [none]));
    const words = [...found].sort().map(([label, {count}]) => `${count} ${label}`).join(", ") || "nothing found";
    const now = performance.now();
    if (words !== this.#announced && now - this.#announcedAt > 4000) {  // for screen readers
      [this.#announced, this.#announcedAt] = [words, now];
      $("announcement").textContent = words;
      $("frame").setAttribute("aria-label", `The live video: ${words}`);
    }
  }

  #showSpeed() {
    const total = this.#means.reduce((sum, part) => sum + part, 0);
    $("total").textContent = Math.round(total);
    const span = this.#times.at(-1) - this.#times[0];
    $("rate").textContent = span > 300 ? (1000 * (this.#times.length - 1) / span).toFixed(span > 0 ? 0 : 1) : "–";
    document.querySelectorAll("#split i").forEach((part, at) => {
      part.style.width = `${100 * this.#means[at] / total}%`;
    });
    document.querySelectorAll("#parts dd").forEach((place, at) => {
      const ms = this.#means[at];
      place.textContent = `${ms < 9.95 ? ms.toFixed(1) : Math.round(ms)} ms`;
    });
    const parts = PARTS.map((name, at) => `${name} ${Math.round(this.#means[at])}`).join(", ");
    $("split").setAttribute("aria-label", `Of ${Math.round(total)} milliseconds: ${parts}`);
  }
}
