// Watches a stream as endless fragmented MP4: for browsers without WebRTC, and networks that block UDP.

const KEPT_S = 10;  // of what was shown
const LATE_S = 1.0;  // further behind the newest frame than this, the video jumps
const MOST_DISCARDED = 5;  // appends that add nothing: some contain no complete frame
const EVENT = 0x656d7367;  // "emsg"

export const playable = "MediaSource" in window || "ManagedMediaSource" in window;

/** The complete boxes at the beginning of `bytes`, and how many bytes they take. */
function boxesIn(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const boxes = [];
  let at = 0;
  while (at + 8 <= bytes.length && at + view.getUint32(at) <= bytes.length) {
    const size = view.getUint32(at);
    boxes.push({kind: view.getUint32(at + 4), bytes: bytes.subarray(at, at + size)});
    at += size;
  }
  return [boxes, at];
}

/** The message of an `emsg` box of version 1. */
function messageIn(box) {
  let at = 32;  // after head, version, time scale, time, duration and number
  for (let strings = 0; strings < 2; at++) if (box[at] === 0) strings++;
  return JSON.parse(new TextDecoder().decode(box.subarray(at)));
}

function joined(...parts) {
  const whole = new Uint8Array(parts.reduce((sum, one) => sum + one.length, 0));
  let at = 0;
  for (const one of parts) {
    whole.set(one, at);
    at += one.length;
  }
  return whole;
}

/**
 * Plays a response of `live.mp4`. `attach(video)` shows it; `ended` resolves when the stream or the connection ends.
 */
export class LiveMp4 {
  #source = new (window.ManagedMediaSource ?? window.MediaSource)();
  #video = null;
  #buffer = null;
  #end = 0; #discarded = 0;
  #reader; #kind; #received;

  constructor(response, received) {
    this.#kind = response.headers.get("Content-Type");
    this.#reader = response.body.getReader();
    this.#received = received;
    this.ended = this.#run();
  }

  attach = (video) => {
    this.#video = video;
    video.disableRemotePlayback = true;  // or Safari's ManagedMediaSource does not open
    video.srcObject = null;
    const url = video.src = URL.createObjectURL(this.#source);
    this.#source.addEventListener("sourceopen", () => URL.revokeObjectURL(url), {once: true});
  };

  async #run() {
    try {
      await new Promise((done) => this.#source.addEventListener("sourceopen", done, {once: true}));
      this.#buffer = this.#source.addSourceBuffer(this.#kind);
      let rest = new Uint8Array(0), media = [];
      for (;;) {
        const {done, value} = await this.#reader.read();
        if (done) return;
        const [boxes, used] = boxesIn(rest = joined(rest, value));
        for (const {kind, bytes} of boxes) {
          if (kind === EVENT) this.#received(messageIn(bytes));
          else media.push(bytes);
        }
        if (media.length) await this.#append(joined(...media));
        if (this.#stuck(media.length)) return;
        media = [];
        rest = rest.slice(used);
        await this.#keepUp();
      }
    } catch {
      // The connection is over, or the browser closed the buffer.
    }
  }

  #done() { return new Promise((done) => this.#buffer.addEventListener("updateend", done, {once: true})); }

  async #append(bytes) {
    const done = this.#done();
    this.#buffer.appendBuffer(bytes);
    await done;
  }

  /**
   * Whether the browser discards all frames until a keyframe, which only a new connection gets. WebKitGTK takes the
   * duration of a frame from the frame rate in the H.264 data, and does so after an interval of more than twice that.
   */
  #stuck(appended) {
    const {buffered} = this.#buffer;
    const end = buffered.length ? buffered.end(buffered.length - 1) : 0;
    if (end > this.#end) this.#discarded = 0;
    else if (appended) this.#discarded++;
    this.#end = Math.max(end, this.#end);
    return this.#discarded > MOST_DISCARDED;
  }

  /** Stay at the newest frame, and drop what was shown. */
  async #keepUp() {
    const {buffered} = this.#buffer;
    if (!buffered.length || !this.#video) return;
    const end = buffered.end(buffered.length - 1), now = this.#video.currentTime;
    if (now < buffered.start(0) || end - now > LATE_S) this.#video.currentTime = Math.max(buffered.start(0), end - 0.1);
    this.#video.playbackRate = end - this.#video.currentTime > LATE_S / 2 ? 1.1 : 1;
    if (now - buffered.start(0) > 2 * KEPT_S) {
      const done = this.#done();
      this.#buffer.remove(0, now - KEPT_S);
      await done;
    }
  }
}
