// The frame on the screen: from a video, matched with its record and drawn; or the server's own drawing as it comes.

import {paint} from "./paint.js";

const $ = (id) => document.getElementById(id);
const NONE = {objects: [], points: []};

/** One stage for the whole page. `own` plays what is sent, `theirs` what the server sends. */
export class Stage {
  own = $("own");
  theirs = $("theirs");
  #canvas = $("frame");
  #color;
  #matcher = null;
  #source = null;  // the video that the frames are taken from
  #burnt = false;
  #shown = null;
  #frozen = false;
  #onFrame; #onShown;

  /**
   * @param onFrame - called with each frame of the video
   * @param onShown - called with the record of each frame that is drawn
   */
  constructor(color, onFrame, onShown) {
    this.#color = color;
    [this.#onFrame, this.#onShown] = [onFrame, onShown];
    for (const video of [this.own, this.theirs]) this.#listen(video);
    const draw = () => {
      requestAnimationFrame(draw);
      this.#draw();
    };
    draw();
  }

  /** Take frames from `video` (`own` or `theirs`) and match them by `matcher`; after `end`. */
  begin(video, matcher) {
    [this.#source, this.#matcher] = [video, matcher];
    $("stage").classList.add("on");
  }

  /** Show what the server drew, instead of drawing here. */
  set burnt(burnt) {
    this.#burnt = burnt;
    this.#shown = null;
    this.#matcher?.clear();
  }

  /** Play the video that the server sends. */
  play(attach) {
    attach(this.theirs);
    this.theirs.play().catch(() => {});  // stopped meanwhile
  }

  /** Hold the frame on the screen, with the boxes found in it; what comes meanwhile is not shown. */
  set frozen(frozen) {
    this.#frozen = frozen;
    if (frozen && this.#burnt) this.theirs.pause();
    else if (this.#burnt) this.theirs.play().catch(() => {});
  }

  get frozen() { return this.#frozen; }

  end() {
    this.#frozen = false;
    this.#matcher?.clear();
    this.#source = this.#matcher = this.#shown = null;
    this.#burnt = false;
    for (const video of [this.own, this.theirs]) {
      video.pause();
      video.srcObject = null;
      if (video.src.startsWith("blob:")) URL.revokeObjectURL(video.src);
      video.removeAttribute("src");
      video.load();
    }
    for (const one of [this.#canvas, this.theirs]) one.classList.remove("seen");
    $("stage").classList.remove("on", "blank");
  }

  /** The frame now on the screen, in its own size, as a PNG, or `plain` as a JPEG; null if there is none for a second. */
  async snapshot({plain = false, tries = 20} = {}) {
    const frame = this.#burnt ? this.theirs : this.#shown?.bitmap;
    const [width, height] = [frame?.videoWidth ?? frame?.width, frame?.videoHeight ?? frame?.height];
    if (!width) {  // between two frames, or before the first of a view
      if (!tries) return null;
      await new Promise((done) => setTimeout(done, 50));
      return this.snapshot({plain, tries: tries - 1});
    }
    const canvas = Object.assign(document.createElement("canvas"), {width, height});
    paint(canvas, frame, this.#burnt || plain ? NONE : this.#shown.record ?? NONE, this.#color);
    return new Promise((done) => canvas.toBlob(done, plain ? "image/jpeg" : "image/png", 0.9));
  }

  /** The frame on the screen and its record; null before the first. */
  get shown() {
    return this.#shown;
  }

  #listen(video) {
    const next = (_, {captureTime, presentationTime, rtpTimestamp, mediaTime}) => {
      video.requestVideoFrameCallback(next);
      const matcher = this.#matcher;
      if (video === this.#source || (this.#burnt && video === this.theirs)) this.#onFrame();
      if (video !== this.#source || this.#burnt) return;
      const theirs = rtpTimestamp ?? Math.round(90_000 * mediaTime);
      const time = video === this.own ? performance.timeOrigin + (captureTime ?? presentationTime) : theirs;
      createImageBitmap(video).then((bitmap) => {
        if (this.#matcher === matcher && !this.#burnt) matcher.frame(time, bitmap);
        else bitmap.close();
      }, () => {});  // no frame after all
    };
    video.requestVideoFrameCallback(next);
  }

  #draw() {
    if (!this.#matcher) return;
    const ready = this.#burnt && this.theirs.videoWidth > 0;
    const pick = this.#burnt || (this.#frozen && this.#shown) ? null : this.#matcher.pick();
    if (pick) this.#paint(pick);
    if (ready) this.#shape(this.theirs.videoWidth, this.theirs.videoHeight);
    this.theirs.classList.toggle("seen", ready);
    this.#canvas.classList.toggle("seen", !ready && this.#shown !== null);
    $("stage").classList.toggle("blank", !ready && this.#shown === null);
  }

  /** Draw the frame on the screen anew: the page has another shape. */
  redraw() { if (this.#shown) this.#paint(this.#shown); }

  #paint(pick) {
    if (pick !== this.#shown && pick.record) this.#onShown(pick.record);
    this.#shown = pick;
    const {bitmap, record} = pick;
    this.#shape(bitmap.width, bitmap.height);
    const room = $("stage").getBoundingClientRect();
    const density = Math.min(devicePixelRatio, 2);
    const scale = density * Math.min(room.width / bitmap.width, room.height / bitmap.height);
    const [width, height] = [Math.round(bitmap.width * scale), Math.round(bitmap.height * scale)];
    if (this.#canvas.width !== width || this.#canvas.height !== height) Object.assign(this.#canvas, {width, height});
    paint(this.#canvas, bitmap, record ?? NONE, this.#color, density);
  }

  #shape(width, height) {
    $("stage").style.setProperty("--aspect", `${width} / ${height}`);
    $("stage").style.setProperty("--wide", width / height);
  }
}
