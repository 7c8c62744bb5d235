// Asks the model about one image: what is in it, and questions in words.

import {ask, Problem} from "./video/link.js";

const $ = (id) => document.getElementById(id);
const MOST_PX = 1920;  // of the longer side of an image that is sent
const ANSWER_MS = 120_000;

/** What is found in a bitmap, as records have it: {objects, points}. */
export async function findIn(bitmap, {detect, point, conf}) {
  const scale = Math.min(1, MOST_PX / Math.max(bitmap.width, bitmap.height));
  const canvas = Object.assign(document.createElement("canvas"), {
    width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale),
  });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const image_url = canvas.toDataURL("image/jpeg", 0.92);
  const seen = {objects: [], points: []};
  for (const object of detect) {
    const {objects} = await post("v1/detect", {image_url, object, settings: {conf}});
    seen.objects.push(...objects.map(({label, score, x_min, y_min, x_max, y_max}) => {
      return {label, score, box_norm: [x_min, y_min, x_max, y_max]};
    }));
  }
  for (const object of point) {
    const {points} = await post("v1/point", {image_url, object, settings: {conf}});
    seen.points.push(...points.map(({label, score, x, y}) => ({label, score, x_norm: x, y_norm: y})));
  }
  return seen;
}

async function post(path, body) {
  return (await request(path, body)).json();
}

function request(path, body, ended = null) {
  const headers = {"Content-Type": "application/json"};
  const signal = AbortSignal.any([AbortSignal.timeout(ANSWER_MS), ...(ended ? [ended] : [])]);
  return ask(path, {method: "POST", headers, body: JSON.stringify(body), signal});
}

/** The box for questions; `snapshot` gives the frame in view, as a JPEG. */
export class Question {
  #snapshot;
  #asking = null;  // ends the answer that is being written

  constructor(snapshot) {
    this.#snapshot = snapshot;
    $("ask").onsubmit = (event) => {
      event.preventDefault();
      if ($("question").value.trim()) this.#ask($("question").value.trim());
    };
  }

  /** Forget what was asked: another frame is in view. */
  clear() {
    this.#asking?.abort();
    this.#asking = null;
    $("answer").hidden = true;
    URL.revokeObjectURL($("asked-frame").src);
  }

  async #ask(question) {
    this.clear();
    const asking = this.#asking = new AbortController();
    const [place, words] = [$("answer"), $("answer-text")];
    place.ariaBusy = true;
    try {
      const frame = await this.#snapshot();
      if (!frame) throw new Problem("No frame has arrived yet. Ask again when the video is shown.");
      if (asking.signal.aborted) return;
      $("asked-frame").src = URL.createObjectURL(frame);
      [place.hidden, words.textContent] = [false, "…"];
      const response = await request("v1/query", {image_url: await dataUrl(frame), question, stream: true}, asking.signal);
      let text = "";
      for await (const event of events(response.body)) {
        if (event.error) throw new Problem(event.error.message);
        text += event.text;
        words.textContent = text;
      }
      if (!text) words.textContent = "The model returned no answer.";
    } catch (problem) {
      if (asking.signal.aborted) return;
      [place.hidden, words.textContent] = [false, problem instanceof Problem ? problem.message : "The connection to the server was lost. Ask again."];
    } finally {
      if (asking === this.#asking) place.ariaBusy = false;
    }
  }
}

const dataUrl = (blob) => new Promise((done) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.readAsDataURL(blob);
});

/** The values of server-sent events. */
async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const lines = (rest + part.value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line.replace(/^data: /, ""));
  }
}
