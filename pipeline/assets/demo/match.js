// Brings each record and its own picture together, though they come by different ways and at different times.

const MOST_DELAY_MS = 600;  // a model slower than that shows its boxes late, rather than the picture
const LONE_MS = 120;  // a picture whose record was lost is shown without, after so long

/** Pictures by time, oldest first; closed when they leave. */
class Ring {
  #frames = [];

  add(time, bitmap, most) {
    this.#frames.push({time, bitmap, came: performance.now()});
    while (this.#frames.length > most) this.#frames.shift().bitmap.close();
  }

  /** The newest one that `fits`; those before it are of no more use. */
  take(fits) {
    const at = this.#frames.findLastIndex(fits);
    if (at < 0) return null;
    for (const old of this.#frames.splice(0, at)) old.bitmap.close();
    return this.#frames[0];
  }

  clear() {
    for (const frame of this.#frames.splice(0)) frame.bitmap.close();
  }
}

/**
 * One's own camera: its pictures are here at once, their records a little later. All pictures are shown so much later
 * that the records have come; one that was not looked at keeps the boxes of the one before. Times are Unix ms.
 */
export class Delayed {
  #ring = new Ring();
  #records = [];
  #delay = 0;

  get delay() { return this.#delay; }

  frame(time, bitmap) { this.#ring.add(time, bitmap, 40); }

  record(time, record) {
    const lag = Math.min(performance.timeOrigin + performance.now() - time, MOST_DELAY_MS);
    this.#delay += (lag > this.#delay ? 0.4 : 0.02) * (lag - this.#delay);  // later at once, sooner bit by bit
    this.#records.push({time, record});
    if (this.#records.length > 60) this.#records.shift();
  }

  /** The picture to show now and its record, or null. */
  pick() {
    const until = performance.timeOrigin + performance.now() - (this.#delay ? this.#delay + 12 : 0);
    const frame = this.#ring.take((one) => one.time <= until);
    if (!frame) return null;
    // A time is told to the millisecond, and a file's is off by some: within half a picture it is the same one.
    return {bitmap: frame.bitmap, record: this.#records.findLast((one) => one.time <= frame.time + 15)?.record};
  }

  clear() {
    this.#ring.clear();
    this.#records = [];
    this.#delay = 0;
  }
}

/** A watched stream: pictures and records come side by side, each with the picture's RTP timestamp. */
export class Paired {
  #ring = new Ring();
  #records = new Map();
  #shown = null;

  delay = 0;

  frame(stamp, bitmap) { this.#ring.add(stamp, bitmap, 30); }

  record(stamp, record) {
    this.#records.set(stamp, record);
    if (this.#records.size > 60) this.#records.delete(this.#records.keys().next().value);
  }

  pick() {
    const now = performance.now();
    const frame = this.#ring.take((one) => this.#records.has(one.time) || now - one.came > LONE_MS);
    if (!frame) return null;
    this.#shown = this.#records.get(frame.time) ?? this.#shown;
    return {bitmap: frame.bitmap, record: this.#shown};
  }

  clear() {
    this.#ring.clear();
    this.#records.clear();
    this.#shown = null;
  }
}
