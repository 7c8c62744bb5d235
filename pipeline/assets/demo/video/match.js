// Brings each record and its own frame together, though they come by different ways and at different times.

const MOST_DELAY_MS = 1500;  // a model slower than that shows some frames without their boxes
const APART_MS = 500;  // between records further apart than that it is not known where things were: the frame before stays
const SAME_MS = 15;  // a time is given to the millisecond, and a file is off by some: nearer than this it is the same
const SAME_OBJECT = 0.2;  // boxes of one name that overlap by as much are one object, a moment later
const LONE_MS = 120;  // a frame whose record was lost is shown without, after so long

const unixNow = () => performance.timeOrigin + performance.now();

/** Frames by time, oldest first; closed when they leave, but for the one on the screen. */
class Ring {
  #frames = [];
  #kept = null;

  add(time, bitmap, most) {
    this.#frames.push({time, bitmap, came: performance.now()});
    while (this.#frames.length > most) this.#drop(this.#frames.shift());
  }

  /** Keep a frame until the next is kept: it is on the screen. */
  keep(frame) {
    const old = this.#kept;
    this.#kept = frame;
    if (old && old !== frame && !this.#frames.includes(old)) old.bitmap.close();
  }

  #drop(frame) {
    if (frame !== this.#kept) frame.bitmap.close();
  }

  /** The newest one of a time, or before it; null if there is none. */
  until(time = Infinity) { return this.#frames.findLast((one) => one.time <= time) ?? null; }

  /** The newest one that `fits`; those before it are of no more use. */
  take(fits) {
    const at = this.#frames.findLastIndex(fits);
    if (at < 0) return null;
    for (const old of this.#frames.splice(0, at)) this.#drop(old);
    return this.#frames[0];
  }

  clear() {
    for (const frame of this.#frames.splice(0)) this.#drop(frame);
    this.keep(null);
  }
}

/**
 * One's own camera: its frames are here at once, their records a little later, and not every frame has one. All are
 * shown so much later that the records before and after have come; between two records the boxes move from one to the
 * other. Times are Unix ms.
 */
export class Delayed {
  #ring = new Ring();
  #records = [];
  #delay = 0;
  #shownAt = 0;

  frame(time, bitmap) { this.#ring.add(time, bitmap, 60); }

  record(time, record) {
    const first = !this.#records.length;
    // The first has its own frame shown again, though later ones have been: 0.3 s sooner than by waiting for others.
    if (first) time = this.#ring.until(time + SAME_MS)?.time ?? time;
    const last = this.#records.at(-1)?.time ?? time;
    const wait = Math.min(unixNow() - time + Math.max(0, time - last), MOST_DELAY_MS);
    const share = first ? 1 : wait > this.#delay ? 0.4 : 0.02;  // later at once, sooner bit by bit
    this.#delay += share * (wait - this.#delay);
    this.#records.push({time, record});
    if (this.#records.length > 60) this.#records.shift();
  }

  /** The frame to show now and its record, or null. */
  pick() {
    if (!this.#records.length) {  // as it comes, and kept: the first record is of a frame that was shown before
      const newest = this.#ring.until();
      if (newest) this.#ring.keep(newest);
      return newest && {bitmap: newest.bitmap, record: null};
    }
    const frame = this.#ring.take((one) => one.time <= unixNow() - this.#delay);
    if (!frame) return null;
    const at = this.#records.findLastIndex((one) => one.time <= frame.time + SAME_MS);
    const [before, after] = [this.#records[at], this.#records[at + 1]];
    const now = performance.now();
    const own = before && frame.time <= before.time + SAME_MS;
    if (before && !own && !(after?.time - before.time < APART_MS) && now - this.#shownAt < 2 * MOST_DELAY_MS) return null;
    this.#shownAt = now;
    this.#ring.keep(frame);
    if (own) return {bitmap: frame.bitmap, record: before.record};
    if (!before || !after || after.time - before.time >= APART_MS) return {bitmap: frame.bitmap, record: null};
    const share = (frame.time - before.time) / (after.time - before.time);
    return {bitmap: frame.bitmap, record: between(before.record, after.record, share)};
  }

  clear() {
    this.#ring.clear();
    this.#records = [];
    this.#delay = 0;
  }
}

/** What is to be seen between two records: whatever is in both is on its way, the rest is where it was last or next. */
function between(before, after, share) {
  const left = [...after.objects];
  const objects = before.objects.flatMap((one) => {
    const fits = left.map((other) => (other.label === one.label ? overlap(one.box_norm, other.box_norm) : 0));
    const best = Math.max(0, ...fits);
    if (best < SAME_OBJECT) return share < 0.5 ? [one] : [];
    const [other] = left.splice(fits.indexOf(best), 1);
    const box_norm = one.box_norm.map((from, at) => from + share * (other.box_norm[at] - from));
    return [{...one, box_norm}];
  });
  const nearest = share < 0.5 ? before : after;
  return {...nearest, objects: [...objects, ...(share < 0.5 ? [] : left)]};
}

/** Intersection over union of two boxes. */
function overlap([ax1, ay1, ax2, ay2], [bx1, by1, bx2, by2]) {
  const width = Math.max(0, Math.min(ax2, bx2) - Math.max(ax1, bx1));
  const inner = width * Math.max(0, Math.min(ay2, by2) - Math.max(ay1, by1));
  return inner / ((ax2 - ax1) * (ay2 - ay1) + (bx2 - bx1) * (by2 - by1) - inner);
}

/** An image: one frame, and its record once that is there. */
export class Still {
  #bitmap; #record = null; #changed = true;

  constructor(bitmap) { this.#bitmap = bitmap; }

  record(record) { [this.#record, this.#changed] = [record, true]; }

  pick() {
    if (!this.#changed) return null;
    this.#changed = false;
    return {bitmap: this.#bitmap, record: this.#record};
  }

  clear() { this.#bitmap.close(); }
}

/** A watched stream: frames and records come side by side, each with the frame's RTP timestamp. */
export class Paired {
  #ring = new Ring();
  #records = new Map();
  #shown = null;

  frame(stamp, bitmap) { this.#ring.add(stamp, bitmap, 30); }

  record(stamp, record) {
    this.#records.set(stamp, record);
    if (this.#records.size > 60) this.#records.delete(this.#records.keys().next().value);
  }

  pick() {
    const now = performance.now();
    const frame = this.#ring.take((one) => this.#records.has(one.time) || now - one.came > LONE_MS);
    if (!frame) return null;
    this.#ring.keep(frame);
    this.#shown = this.#records.get(frame.time) ?? this.#shown;
    return {bitmap: frame.bitmap, record: this.#shown};
  }

  clear() {
    this.#ring.clear();
    this.#records.clear();
    this.#shown = null;
  }
}
