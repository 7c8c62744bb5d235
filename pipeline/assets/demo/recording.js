// What was recorded of a stream: the last hour, day or week as a strip with its gaps, and a player that goes where one presses.

import {ask} from "./video/link.js";

const $ = (id) => document.getElementById(id);
const LIST_MS = 10_000;
const DAY_S = 86_400;
const WEEK_S = 7 * DAY_S;
const SAVE_MS = 60_000;
const WAIT_MS = 1000;
const AT_ONCE_S = 600;  // of parts that are asked for at a time
const AHEAD_S = 20;  // that are loaded before they are shown
const BEHIND_S = 60;  // that are kept after

const clock = new Intl.DateTimeFormat([], {
  weekday: "short", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false,
});

/** When something was, in words. */
const words = (time) => clock.format(new Date(1000 * time));

/** The recordings of all streams that have one. */
export class Recordings {
  #shown = false;
  #stream = null;
  #spans = [];
  #events = [];
  #asked = 0;
  #known = new Map();  // stream → whether it is recorded
  #length = 3600;  // of the strip, in seconds
  #player = new Player($("recording-video"), (time) => this.#mark(time));

  constructor() {
    $("recording-stream").onchange = () => { location.hash = `#/recording/${encodeURIComponent($("recording-stream").value)}`; };
    const strip = $("recording-strip");
    strip.onclick = (event) => {
      const box = strip.getBoundingClientRect();
      this.play(this.#begin + this.#length * (event.clientX - box.left) / box.width);
    };
    strip.onkeydown = ({key}) => {
      const step = {ArrowLeft: -10, ArrowRight: 10, PageUp: -3600, PageDown: 3600}[key];
      if (step) this.play((this.#player.time ?? this.#end - 60) + step);
    };
    $("recording-length").onchange = () => {
      this.#length = Number($("recording-length").value);
      $("recording-strip").setAttribute("aria-valuemax", this.#length);
      this.#list();
    };
    $("recording-save").onclick = () => this.#save();
    setInterval(() => this.#shown && this.#stream && !document.hidden && this.#list(), LIST_MS);
  }

  set shown(shown) {
    this.#shown = shown;
    if (!shown) this.#player.stop();
  }

  /** Learn which streams are recorded; the view is offered when one is. */
  async offer(names) {
    const fresh = names.filter((name) => !this.#known.has(name));
    await Promise.all(fresh.map(async (name) => {
      this.#known.set(name, false);
      const path = `streams/${encodeURIComponent(name)}/recording/spans?from=1s`;
      await ask(path).then((answer) => answer.json()).then(({recorded}) => this.#known.set(name, recorded), () => {});
    }));
    for (const name of this.#known.keys()) if (!names.includes(name)) this.#known.delete(name);
    const recorded = [...this.#known].filter(([, has]) => has).map(([name]) => name);
    document.querySelector("[data-view=recording]").hidden = !recorded.length;
    const select = $("recording-stream");
    if ([...select.options].map(({value}) => value).join("\n") !== recorded.join("\n")) {
      select.replaceChildren(...recorded.map((name) => new Option(name, name)));
      select.value = this.#stream ?? select.value;
    }
    if (this.#shown && !this.#stream && recorded.length) await this.open(null, null);
  }

  /** Show a stream's, or the first one's; from a time on, if that is given. */
  async open(stream, time) {
    this.#stream = stream ?? ($("recording-stream").value || null);
    if (!this.#stream) return;  // until it is known which are recorded
    $("recording-stream").value = this.#stream;
    await this.#list();
    const last = this.#spans.at(-1);
    if (time) await this.play(time);
    else if (last) await this.play(Math.max(last.begin, last.end - 60));
  }

  async play(time) {
    if (time < this.#begin && this.#length < WEEK_S) {  // as of an older event
      $("recording-length").value = time < this.#end - DAY_S ? WEEK_S : DAY_S;
      this.#length = Number($("recording-length").value);
      await this.#list();
    }
    const span = this.#spans.find(({end}) => end > time) ?? this.#spans.at(-1);
    if (!span) return;
    try {
      await this.#player.play(this.#path, Math.min(Math.max(time, span.begin), span.end - 1));
    } catch (problem) {
      $("recording-note").textContent = problem.message;
    }
  }

  get #path() { return `streams/${encodeURIComponent(this.#stream)}/recording`; }

  get #end() { return Date.now() / 1000; }

  get #begin() { return this.#end - this.#length; }

  async #list() {
    const asked = ++this.#asked;
    try {
      const {spans} = await (await ask(`${this.#path}/spans?from=${this.#length}s`)).json();
      const query = new URLSearchParams({stream: this.#stream, since: `${this.#length}s`, limit: 500});
      const stored = !document.querySelector("[data-view=events]").hidden;
      const {events} = stored ? await (await ask(`events?${query}`)).json() : {events: []};
      if (asked !== this.#asked) return;
      [this.#spans, this.#events] = [spans, events];
    } catch (problem) {
      this.#spans = [];
      $("recording-note").textContent = problem.message;
    }
    this.#draw();
  }

  #draw() {
    const place = (time) => `${Math.max(0, 100 * (time - this.#begin) / this.#length)}%`;
    const bars = this.#spans.map(({begin, end, after}) => {
      const bar = document.createElement("i");
      bar.style.left = place(begin);
      bar.style.width = `max(2px, ${100 * (end - Math.max(begin, this.#begin)) / this.#length}%)`;
      bar.title = `${words(begin)} – ${words(end)}${after ? `; before: ${after}` : ""}`;
      return bar;
    });
    const marks = this.#events.filter(({start_time: time}) => time > this.#begin).map((event) => {
      const mark = document.createElement("b");
      mark.style.left = place(event.start_time);
      mark.title = `${event.rule}: ${event.label}, ${words(event.start_time)}`;
      return mark;
    });
    $("recording-strip").replaceChildren(...bars, ...marks, $("recording-now") ?? this.#cursor());
    const gaps = this.#spans.slice(1).filter(({after}) => after).length;
    $("recording-strip").setAttribute("aria-valuetext", this.#player.time ? words(this.#player.time) : "not playing");
    if (this.#spans.length) {
      const missing = gaps ? ` with ${gaps} ${gaps > 1 ? "gaps" : "gap"}` : "";
      $("recording-note").textContent = `Recorded since ${words(Math.max(this.#begin, this.#spans[0].begin))}${missing}`;
    }
    this.#mark(this.#player.time);
  }

  #cursor() {
    return Object.assign(document.createElement("em"), {id: "recording-now", hidden: true});
  }

  #mark(time) {
    const cursor = $("recording-now");
    if (cursor) cursor.hidden = !time;
    if (!cursor || !time) return;
    cursor.style.left = `${100 * (time - this.#begin) / this.#length}%`;
    $("recording-time").textContent = words(time);
    $("recording-strip").setAttribute("aria-valuenow", Math.round(time - this.#begin));
    $("recording-strip").setAttribute("aria-valuetext", words(time));
  }

  async #save() {
    const time = this.#player.time;
    if (!time) return;
    try {
      const query = `from=${(time - 30).toFixed(1)}&to=${(time + 30).toFixed(1)}`;
      const file = await (await ask(`${this.#path}?${query}`, {signal: AbortSignal.timeout(SAVE_MS)})).blob();
      const name = `${this.#stream} ${new Date(1000 * time).toISOString().slice(0, 19).replaceAll(":", "-")}.mp4`;
      const link = Object.assign(document.createElement("a"), {href: URL.createObjectURL(file), download: name});
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    } catch (problem) {
      $("recording-note").textContent = problem.message;
    }
  }
}

/** Plays parts of files one behind the other, whatever their gaps. */
class Player {
  #video; #tell;
  #path = "";
  #parts = [];  // not loaded yet
  #loaded = [];  // {at, begin, duration}: where a part is in the video, and when that was
  #buffer = null;
  #round = 0;

  constructor(video, tell) {
    this.#video = video;
    this.#tell = tell;
    video.ontimeupdate = () => {
      if (this.time) this.#tell(this.time);
      this.#load();
    };
    setInterval(() => this.#load(), WAIT_MS);  // at the end, for what comes
  }

  /** Unix time of what is shown; null if nothing is. */
  get time() {
    const now = this.#video.currentTime;
    const part = this.#loaded.findLast(({at}) => at <= now + 0.01);
    return part ? part.begin + now - part.at : null;
  }

  stop() {
    this.#round++;
    this.#buffer = null;
    this.#loaded = [];
    this.#video.removeAttribute("src");
    this.#video.load();
  }

  async play(path, time) {
    this.stop();
    const round = this.#round;
    this.#path = path;
    this.#parts = await this.#list(time);
    if (round !== this.#round || !this.#parts.length) return;
    const source = new MediaSource();
    this.#video.src = URL.createObjectURL(source);
    await new Promise((done) => source.addEventListener("sourceopen", done, {once: true}));
    URL.revokeObjectURL(this.#video.src);
    if (round !== this.#round) return;
    const kind = `video/mp4; codecs="${this.#parts[0].codecs}"`;
    if (!MediaSource.isTypeSupported(kind)) throw new Error(`This browser cannot play the codec ${this.#parts[0].codecs}; save the video instead.`);
    this.#buffer = source.addSourceBuffer(kind);
    const skipped = Math.max(0, time - this.#parts[0].begin);
    await this.#load();
    if (round !== this.#round) return;
    this.#video.currentTime = skipped;
    await this.#video.play();
  }

  async #list(from) {
    const query = new URLSearchParams({from: from.toFixed(3), to: (from + AT_ONCE_S).toFixed(3), parts: true});
    return (await (await ask(`${this.#path}/spans?${query}`)).json()).parts;
  }

  #loading = null;

  /** Load what comes next, as far as it is needed. */
  async #load() {
    if (this.#loading === this.#round) return;
    const round = this.#loading = this.#round;
    try {
      while (this.#buffer && round === this.#round) {
        const last = this.#loaded.at(-1);
        const end = last ? last.at + last.duration : 0;
        if (end - this.#video.currentTime > AHEAD_S) break;
        if (!this.#parts.length && last) {
          const known = last.begin + last.duration;
          const listed = await this.#list(known);
          if (round !== this.#round) break;
          this.#parts = listed.filter(({begin, duration}) => begin + duration > known + 0.05);
        }
        const part = this.#parts.shift();
        if (!part || round !== this.#round) break;
        // A part of a file that was still written comes again, longer, in the same place.
        const goesOn = last?.file === part.file;
        const at = goesOn ? last.at + part.start - last.start : end;
        await this.#append(part, at, !goesOn);
        if (round === this.#round) this.#loaded.push({...part, at});
      }
    } catch (error) {
      if (round === this.#round) throw error;  // otherwise `stop` has removed the buffer
    } finally {
      if (this.#loading === round) this.#loading = null;
    }
  }

  async #append(part, at, begins) {
    const buffer = this.#buffer;
    const bytes = async (offset, size) => {
      const headers = {Range: `bytes=${offset}-${offset + size - 1}`};
      return (await ask(`${this.#path}/files/${part.file}`, {headers})).arrayBuffer();
    };
    const append = (data) => new Promise((done, failed) => {
      buffer.addEventListener("updateend", done, {once: true});
      buffer.addEventListener("error", () => failed(new Error("This part of the recording cannot be played.")), {once: true});
      buffer.appendBuffer(data);
    });
    const data = await bytes(part.offset, part.size);
    if (begins) {
      buffer.changeType(`video/mp4; codecs="${part.codecs}"`);
      await append(await bytes(0, part.head));
    }
    const old = this.#video.currentTime - BEHIND_S;
    if (old > 0 && buffer.buffered.length && buffer.buffered.start(0) < old) {
      buffer.remove(0, old);
      await new Promise((done) => buffer.addEventListener("updateend", done, {once: true}));
    }
    buffer.timestampOffset = at - part.start;
    await append(data);
  }
}
