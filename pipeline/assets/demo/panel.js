// What stands beside the frame: what to find.

import {ask} from "./video/link.js";

const $ = (id) => document.getElementById(id);
const FIRST = ["person", "face", "cat", "dog", "car", "bicycle", "cup", "cell phone", "laptop", "chair", "bottle"];
const IDEAS = 6;
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
    if (model.prompts) this.take(model.prompts, model.colors);
    for (const one of [$("find"), $("settings")]) one.hidden = !model.model;
    $("names").replaceChildren(...(this.#classes ?? []).map((value) => make("option", {value})));
    $("all").hidden = !this.#classes;
    $("all").querySelector("summary").textContent = `All classes of ${model.model} (${this.#classes?.length})`;
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

  /** Show what is wrong with a name; nothing if "". The names that the model knows are one press away, and no reproach. */
  #warn(words) {
    $("unknown").hidden = !words;
    const [wrong, known] = words.split(/[.;]? (?=Classes: )/);
    $("unknown").replaceChildren(make("b", {textContent: `${wrong.replace(/[.?]?$/, (end) => end || ".")}`}));
    if (!known) return;
    const near = wrong.match(/did you mean '(.+)'/)?.[1];
    const all = make("button", {type: "button", className: "link", textContent: `Show all ${this.#classes?.length} labels`});
    all.onclick = () => {
      $("all").open = true;
      $("all").querySelector("summary").focus();
    };
    if (near) {
      const take = make("button", {type: "button", className: "link", textContent: `Find ${near}`});
      take.onclick = () => this.add(near);
      $("unknown").append(take);
    }
    $("unknown").append(all);
  }

  refuse(words) { this.#warn(words); }

  #remove(name) {
    if (this.#names.length === 1) return this.#warn("At least one label is required. Add another label first.");
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
      cross.setAttribute("aria-label", `Remove the label ${name}`);
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
