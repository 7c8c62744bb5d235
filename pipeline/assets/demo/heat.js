// Where objects have been since the stream began, in colours over the frame, while a button is pressed.

import {ask} from "./video/link.js";

const $ = (id) => document.getElementById(id);
const FRESH_MS = 5000;

/** The heatmap of the stream in view. */
export class Heat {
  #stream = null;
  #timer = 0;

  constructor() {
    $("heat").onclick = () => this.toggle();
  }

  /** Offer it for a stream. */
  open(stream) {
    this.close();
    this.#stream = stream;
    $("heat").hidden = false;
  }

  close() {
    this.#stream = null;
    this.#show(false);
    $("heat").hidden = true;
  }

  toggle() {
    if (this.#stream) this.#show(!$("stage").classList.contains("heated"));
  }

  #show(wanted) {
    clearTimeout(this.#timer);
    $("stage").classList.toggle("heated", wanted);
    $("heat").setAttribute("aria-pressed", wanted);
    if (wanted) this.#load();
  }

  async #load() {
    const stream = this.#stream;
    try {
      const url = URL.createObjectURL(await (await ask(`streams/${encodeURIComponent(stream)}/heatmap.png`)).blob());
      const old = $("heatmap").src;
      $("heatmap").src = url;
      if (old) URL.revokeObjectURL(old);
    } catch { /* the next time, perhaps */ }
    if (stream === this.#stream) this.#timer = setTimeout(() => this.#load(), FRESH_MS);
  }
}
