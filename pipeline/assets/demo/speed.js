// What was found, how long it took, and how often: in words that need no explanation, and one number for the delay.

const $ = (id) => document.getElementById(id);
const PARTS = ["network", "video", "waiting", "seeing", "finding"];
const RECENT_MS = 4000;
const DROPS_MS = 15000;
const CAUSES = {
  lost: "lost between the source and Saccade",
  full: "the model was busy",
  max_fps: "above max_fps",
  deadline: "too late for deadline_ms",
  gate: "rejected by a gate",
  failed: "the model or a stage failed",
};  // docs/guides/http.md, without results that a sink has dropped

const make = (tag, properties) => Object.assign(document.createElement(tag), properties);

/** Times of the last seconds, as a rate. */
class Rate {
  #times = [];

  note() {
    const now = performance.now();
    this.#times = [...this.#times.filter((time) => now - time < RECENT_MS), now];
  }

  get text() {
    const times = this.#times;
    const span = times.at(-1) - times[0];
    return span > 300 ? (1000 * (times.length - 1) / span).toFixed(0) : "–";
  }
}

/** What was found, and how long it took, of the last second or two. */
export class Figures {
  #analysed = new Rate();
  #video = new Rate();
  #means = null;
  #announced = "";
  #announcedAt = 0;
  #shownAt = 0;
  #foundAt = 0;
  #counts = [];  // of frames, as the server has counted them in the last seconds

  /** A frame of the video has come. */
  frame() { this.#video.note(); }

  /**
   * @param latency - of the record, in ms
   * @param network - ms on the way
   * @param coding - ms that the video took to be packed and unpacked, decoding in the server not among them
   */
  note(latency, network, coding) {
    this.#analysed.note();
    const model = latency.prefill + latency.decode_tokens;
    const waiting = Math.max(0, latency.total - latency.decode - model);
    const parts = [network, coding + latency.decode, waiting, latency.prefill, latency.decode_tokens];
    this.#means = (this.#means ?? parts).map((mean, part) => mean + 0.15 * (parts[part] - mean));
    const now = performance.now();
    if (now - this.#shownAt < 200) return;  // five times a second is enough to read
    this.#shownAt = now;
    this.#showSpeed();
  }

  /** A frame with what was found in it is on the screen. */
  shown(record, color) {
    const now = performance.now();
    if (now - this.#foundAt < 200) return;
    this.#foundAt = now;
    this.#showFound(record, color);
  }

  /** What share of the frames was dropped in the last seconds, and why; `stream` is as the server lists it. */
  drops({frames_in: read, dropped}) {
    const now = performance.now();
    const all = read + (dropped.lost ?? 0);
    if (all < this.#counts.at(-1)?.all) this.#counts = [];  // the stream has been restarted
    this.#counts = [...this.#counts.filter(({at}) => now - at < DROPS_MS), {at: now, all, dropped}];
    const first = this.#counts[0];
    const frames = all - first.all;
    const lately = Object.keys(CAUSES)
      .map((cause) => [cause, (dropped[cause] ?? 0) - (first.dropped[cause] ?? 0)])
      .filter(([, count]) => count > 0);
    const sum = lately.reduce((total, [, count]) => total + count, 0);
    $("dropped").hidden = !frames;
    $("dropped").querySelector("b").textContent = frames ? `${Math.min(100, Math.round(100 * sum / frames))}%` : "–";
    $("dropped").title = lately.map(([cause, count]) => `${count}: ${CAUSES[cause]} (${cause})`).join("\n");
  }

  clear() {
    this.#counts = [];
    $("dropped").hidden = true;
    [this.#analysed, this.#video, this.#means] = [new Rate(), new Rate(), null];
    $("found").replaceChildren(make("li", {className: "dim", textContent: "nothing yet"}));
    for (const place of [$("total"), $("rate"), $("video-rate"), ...document.querySelectorAll("#parts dd:not(.dim)")]) {
      place.textContent = "–";
    }
    for (const part of document.querySelectorAll("#split i")) part.style.width = 0;
  }

  #showFound({objects, points, segments, answers}, color) {
    const found = new Map();
    for (const {label, score = 0} of [...objects, ...points, ...(segments ?? [])]) {  // an outline has no score
      const {count, best} = found.get(label) ?? {count: 0, best: 0};
      found.set(label, {count: count + 1, best: Math.max(best, score)});
    }
    const lines = [...found].sort().map(([label, {count, best}]) => {
      const line = document.createElement("li");
      line.style.setProperty("--chip", color(label));
      const name = make("b", {textContent: count > 1 ? `${count} × ${label}` : label});
      const score = make("span", {textContent: best ? `${Math.round(100 * best)}%` : "outline"});
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
    $("rate").textContent = this.#analysed.text;
    $("video-rate").textContent = this.#video.text;
    document.querySelectorAll("#split i").forEach((part, at) => {
      part.style.width = `${100 * this.#means[at] / total}%`;
    });
    document.querySelectorAll("#parts dd:not(.dim)").forEach((place, at) => {
      const ms = this.#means[at];
      place.textContent = `${ms < 9.95 ? ms.toFixed(1) : Math.round(ms)} ms`;
    });
    const parts = PARTS.map((name, at) => `${name} ${Math.round(this.#means[at])}`).join(", ");
    $("split").setAttribute("aria-label", `Latency of ${Math.round(total)} milliseconds: ${parts}`);
  }
}
