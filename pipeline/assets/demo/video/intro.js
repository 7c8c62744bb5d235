// The first second: the demo clip with its boxes, as the model found them once; nothing is sent anywhere for it.

import {paint} from "./paint.js";

const LABEL = "person";
const STILL_S = 3;  // what is shown where motion is not wanted

/** Plays in `canvas` between `start` and `stop`. */
export class Intro {
  #canvas; #color; #found = null; #video = null; #still = matchMedia("(prefers-reduced-motion: reduce)").matches;

  constructor(canvas, color) {
    this.#canvas = canvas;
    this.#color = color;
  }

  async start() {
    if (this.#video) return;
    const video = this.#video = Object.assign(document.createElement("video"), {
      src: "clip.mp4", muted: true, loop: true, playsInline: true, preload: "auto",
    });
    try {
      this.#found ??= await (await fetch("clip.json")).json();
      if (video !== this.#video) return;
      const show = (_, {mediaTime}) => {
        if (video !== this.#video) return;
        video.requestVideoFrameCallback(show);
        this.#paint(video, mediaTime);
      };
      video.requestVideoFrameCallback(show);
      if (this.#still) video.currentTime = STILL_S;
      else await video.play();
    } catch { /* no clip, no intro */ }
  }

  stop() {
    this.#video?.pause();
    this.#video?.removeAttribute("src");
    this.#video?.load();
    this.#video = null;
    this.#canvas.classList.remove("seen");
  }

  #paint(video, time) {
    const {rate, frames} = this.#found;
    const found = frames[Math.round(time * rate)] ?? [];
    const objects = found.map(([x1, y1, x2, y2, score]) => {
      return {label: LABEL, score: score / 100, box_norm: [x1, y1, x2, y2].map((one) => one / 1000)};
    });
    const density = Math.min(devicePixelRatio, 2);
    const width = Math.round(density * this.#canvas.clientWidth);
    const height = Math.round(width * video.videoHeight / video.videoWidth);
    if (!width || !height) return;
    if (this.#canvas.width !== width || this.#canvas.height !== height) Object.assign(this.#canvas, {width, height});
    paint(this.#canvas, video, {objects, points: []}, this.#color, density);
    this.#canvas.classList.add("seen");
  }
}
