// Turns the ONVIF camera of the stream in view to one of its presets.

import {notify} from "./notes.js";
import {ask} from "./video/link.js";

const $ = (id) => document.getElementById(id);
const CAMERA_MS = 25_000;  // longer than the server waits for a camera

/** The list of presets beside the video. It is hidden for other sources, for cameras without presets and for viewers. */
export class Ptz {
  #stream = null;
  #select = $("presets").querySelector("select");

  constructor() {
    this.#select.onchange = () => this.#turn(this.#select.value);
  }

  async open(stream) {
    this.close();
    if (document.body.dataset.role === "viewer") return;
    this.#stream = stream;
    try {
      const {source} = await (await ask(`streams/${encodeURIComponent(stream)}`)).json();
      if (!source.startsWith("onvif://")) return;
      const {presets} = await (await this.#camera("")).json();
      if (stream !== this.#stream || !presets.length) return;
      const options = presets.map(({token, name}) => new Option(name || token, token));
      this.#select.replaceChildren(new Option("Turn to preset…", ""), ...options);
      $("presets").hidden = false;
    } catch { /* a camera without PTZ */ }
  }

  close() {
    this.#stream = null;
    $("presets").hidden = true;
  }

  async #turn(preset) {
    this.#select.value = "";  // so that the same preset can be chosen again
    try {
      if (preset) await this.#camera(`/${encodeURIComponent(preset)}`, "POST");
    } catch (problem) {
      notify(problem.message);
    }
  }

  #camera(path, method = "GET") {
    const signal = AbortSignal.timeout(CAMERA_MS);
    return ask(`streams/${encodeURIComponent(this.#stream)}/ptz/presets${path}`, {method, signal});
  }
}
