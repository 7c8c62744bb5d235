// The rules of the stream in view: how each is doing, and a text in which they are changed.

import {timeOf} from "../timeline.js";
import {ask} from "../video/link.js";
import {Editor, newRule} from "./editor.js";

const $ = (id) => document.getElementById(id);
const STATE_MS = 1000;
const YAML = "application/yaml";

const make = (tag, properties, ...children) => {
  const one = Object.assign(document.createElement(tag), properties);
  one.append(...children);
  return one;
};

/** One rule in the list. */
class Item {
  #light = make("i", {ariaHidden: "true"});
  #when = make("span", {className: "dim when"});
  #now = make("span", {className: "now"});
  #fill = make("i", {});
  #bar = make("span", {className: "bar"}, this.#fill);
  #value = make("output", {});
  #asked = make("div", {className: "asked", hidden: true});

  constructor(name, {edit, remove}) {
    const open = make("button", {type: "button", className: "rule", title: "Edit this rule"}, this.#light,
      make("b", {textContent: name}), this.#now, this.#when);
    open.onclick = edit;
    const cross = make("button", {type: "button", className: "cross", textContent: "×", ariaLabel: `Remove ${name}`});
    cross.onclick = remove;
    this.#asked.append(make("span", {className: "dim"}), make("span", {className: "measure"}, this.#bar, this.#value));
    this.element = make("li", {}, open, cross, this.#asked);
    this.element.dataset.rule = name;
  }

  update({when, ask: question, expect, threshold, holds, p_yes: p, event, since, problem}) {
    this.#light.className = event ? "ok" : "off";
    this.#when.textContent = problem ?? when;
    this.#when.classList.toggle("wrong", Boolean(problem));
    this.#now.textContent = event ? `now · ${lengthOf(since)}` : holds && question && p === null ? "asking" : "";
    this.#asked.hidden = !question;
    if (!question) return;
    this.#asked.firstChild.textContent = question;
    const [on, off] = [threshold.on, threshold.off].map((one) => (expect === "yes" ? one : 1 - one));
    this.#bar.style.setProperty("--on", on);
    this.#bar.style.setProperty("--off", off);
    this.#fill.style.width = `${100 * (p ?? 0)}%`;
    this.#value.textContent = p === null ? "–" : `${Math.round(100 * p)}%`;
    const words = p === null ? "is unknown" : `is ${Math.round(100 * p)} percent`;
    this.#bar.title = `The probability of the answer yes ${words}. An event begins at ${Math.round(100 * on)}% and ends at ${Math.round(100 * off)}%.`;
    this.#bar.setAttribute("role", "img");
    this.#bar.setAttribute("aria-label", this.#bar.title);
  }
}

function lengthOf(since) {
  const seconds = Math.max(0, Math.round(Date.now() / 1000 - since));
  return seconds < 60 ? `${seconds} s` : seconds < 86400 ? `${Math.round(seconds / 60)} min` : timeOf({start_time: since});
}

/** The rules of the stream in view. */
export class Rules {
  #stream = null; #timer = 0; #items = new Map();
  #editor = new Editor((text) => this.#send("POST", "/check", text), (text) => this.#send("PUT", "", text));

  constructor() {
    $("add-rule").onclick = () => this.#edit({added: newRule([...this.#items.keys()])});
    $("edit-rules").onclick = () => this.#edit({});
  }

  /** Show those of a stream; nothing where the server has none to give. */
  async open(stream) {
    this.close();
    this.#stream = stream;
    await this.#refresh();
  }

  close() {
    clearTimeout(this.#timer);
    this.#editor.close();
    this.#stream = null;
    this.#items.clear();
    $("rule-list").replaceChildren();
    $("rules").hidden = true;
  }

  get #path() { return `streams/${encodeURIComponent(this.#stream)}/rules`; }

  /** Show how they are doing, again and again while the stream is in view. */
  async #refresh() {
    const stream = this.#stream;
    clearTimeout(this.#timer);
    try {
      if (!document.hidden) {
        const {rules} = await (await ask(`${this.#path}/state`)).json();
        if (stream !== this.#stream || !rules) return;
        this.#show(rules);
      }
    } catch (problem) {
      if (stream !== this.#stream || problem.final) return;  // there are none here
    }
    this.#timer = setTimeout(() => this.#refresh(), STATE_MS);
  }

  #show(rules) {
    $("rules").hidden = false;
    const names = rules.map(({name}) => name);
    for (const [name, item] of this.#items) {
      if (names.includes(name)) continue;
      item.element.remove();
      this.#items.delete(name);
    }
    for (const rule of rules) {
      const {name} = rule;
      if (!this.#items.has(name)) {
        this.#items.set(name, new Item(name, {edit: () => this.#edit({name}), remove: () => this.#remove(name)}));
      }
      const item = this.#items.get(name);
      item.update(rule);
      const place = $("rule-list").children[names.indexOf(name)];
      if (place !== item.element) $("rule-list").insertBefore(item.element, place ?? null);
    }
    $("edit-rules").hidden = !rules.length;
  }

  async #edit(how) {
    if ($("main").closest("[data-role=viewer]")) return;
    const stream = this.#stream;
    this.#problem("");
    try {
      const text = await (await ask(this.#path, {headers: {Accept: YAML}})).text();
      if (stream === this.#stream) this.#editor.open(text, how);
    } catch (problem) {
      this.#problem(problem.message);
    }
  }

  async #remove(name) {
    try {
      const {rules} = await (await ask(this.#path)).json();
      const left = {rules: rules.filter((rule) => rule.name !== name)};
      const headers = {"Content-Type": "application/json"};
      await ask(this.#path, {method: "PUT", headers, body: JSON.stringify(left)});
      this.#problem("");
      this.#editor.close();
      $("add-rule").focus();
    } catch (problem) {
      this.#problem(problem.message);
    }
    this.#refresh();
  }

  /** Send a text; null if it was right, else {error, line, column}. */
  async #send(method, path, body) {
    try {
      await ask(`${this.#path}${path}`, {method, headers: {"Content-Type": YAML}, body});
      if (method === "PUT") {
        $("announcement").textContent = "The new rules apply from the next frame";
        this.#refresh();
      }
      return null;
    } catch ({message, body: answer}) {
      return answer?.error ? answer : {error: message};
    }
  }

  #problem(words) {
    $("rule-problem").textContent = words;
    $("rule-problem").hidden = !words;
  }
}
