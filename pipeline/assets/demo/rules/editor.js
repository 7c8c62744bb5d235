// A text of rules with line numbers, in which the server's complaint is marked where the mistake is.

const $ = (id) => document.getElementById(id);
const PAUSE_MS = 300;  // after the last key, before the text is checked
const ROWS = [4, 18];
const NAME = {name: "rule", when: "person for 2s"};  // of a new rule

const make = (tag, properties, ...children) => {
  const one = Object.assign(document.createElement(tag), properties);
  one.append(...children);
  return one;
};

/** The editor; closed at first. */
export class Editor {
  #check; #apply; #timer = 0; #turn = 0; #mistake = null; #back = null;
  #text = $("rule-text");

  /**
   * @param check - whether a text could be applied: resolves to null, or {error, line, column}
   * @param apply - likewise, and does it
   */
  constructor(check, apply) {
    [this.#check, this.#apply] = [check, apply];
    this.#text.oninput = () => this.#changed();
    this.#text.onscroll = () => this.#scroll();
    this.#text.onkeydown = (event) => this.#key(event);
    $("rule-editor").onsubmit = (event) => {
      event.preventDefault();
      this.#submit();
    };
    $("cancel-rules").onclick = () => this.close();
    $("rule-mistake").onclick = () => this.#select(this.#mistake);
  }

  /** Whether it is open. */
  get busy() { return !$("rule-editor").hidden; }

  /** Open it on a text, at a rule of that name if there is one; with one more rule if `added`. */
  open(text, {name = null, added = null} = {}) {
    this.#back = document.activeElement;
    this.#text.value = added ? `${text}- name: ${added.name}\n  when: ${added.when}\n` : text;
    $("rule-editor").hidden = false;
    $("rule-buttons").hidden = true;
    this.#show(null);
    this.#text.focus();
    const wanted = added ? added.when : `name: ${name}`;
    const at = name || added ? this.#text.value.lastIndexOf(wanted) : 0;
    this.#text.setSelectionRange(Math.max(0, at), Math.max(0, at + (added ? wanted.length : 0)));
    this.#changed();
  }

  close() {
    clearTimeout(this.#timer);
    this.#turn++;
    const focused = $("rule-editor").contains(document.activeElement);
    $("rule-editor").hidden = true;
    $("rule-buttons").hidden = false;
    if (focused) this.#back?.focus?.();
  }

  #changed() {
    this.#show(null);
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(this.#check), PAUSE_MS);
  }

  async #submit() {
    clearTimeout(this.#timer);
    if (await this.#ask(this.#apply)) this.close();
  }

  /** Have the text checked, or applied; whether it was right. What was asked before is of no more interest. */
  async #ask(how) {
    const turn = ++this.#turn;
    const mistake = await how(this.#text.value);
    if (turn !== this.#turn) return false;
    this.#show(mistake);
    return !mistake;
  }

  #key(event) {
    event.stopPropagation();  // the keys of the page are letters here
    if (event.key === "Escape") this.close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#submit();
  }

  #select({line, column}) {
    const lines = this.#text.value.split("\n");
    const at = lines.slice(0, line - 1).reduce((sum, one) => sum + one.length + 1, 0) + column - 1;
    this.#text.focus();
    this.#text.setSelectionRange(at, at + wordAt(lines[line - 1] ?? "", column).length);
  }

  #show(mistake) {
    this.#mistake = mistake;
    const lines = this.#text.value.split("\n");
    this.#text.rows = Math.min(ROWS[1], Math.max(ROWS[0], lines.length + 1));
    $("rule-lines").replaceChildren(...lines.map((line, at) => {
      const row = make("span", {className: "line"});
      if (mistake?.line !== at + 1) return row.append(`${line}\n`), row;
      row.classList.add("bad");
      const word = wordAt(line, mistake.column);
      const [before, after] = [line.slice(0, mistake.column - 1), line.slice(mistake.column - 1 + word.length)];
      row.append(before, make("mark", {textContent: word || " "}), `${after}\n`);
      return row;
    }));
    this.#scroll();
    $("rule-mistake").hidden = !mistake;
    $("rule-mistake").disabled = !mistake?.line;
    $("rule-where").textContent = mistake?.line ? `Line ${mistake.line}, column ${mistake.column}` : "";
    $("rule-reason").textContent = mistake?.error ?? "";
    this.#text.setAttribute("aria-invalid", Boolean(mistake));
  }

  #scroll() {
    $("rule-lines").style.translate = `${-this.#text.scrollLeft}px ${-this.#text.scrollTop}px`;
    $("rule-lines").style.setProperty("--left", `${this.#text.scrollLeft}px`);
  }
}

/** A rule to begin with, whose name no other has. */
export function newRule(names) {
  let {name} = NAME;
  for (let number = 2; names.includes(name); number++) name = `${NAME.name}-${number}`;
  return {...NAME, name};
}

/** What is at a column of a line: up to the next space. */
const wordAt = (line, column) => line.slice(column - 1).match(/^\s*\S*/)[0];
