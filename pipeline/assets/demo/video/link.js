// Talks to the server: plain requests, and one WebRTC session that comes back by itself when it is lost.

import {LiveMp4, playable} from "./live_mp4.js";

const asked = new URLSearchParams(location.search);
let token = asked.get("token");
try {
  token ??= sessionStorage.getItem("token");
  if (asked.has("token")) {
    sessionStorage.setItem("token", token);
    history.replaceState(null, "", location.pathname);  // so that it is not copied along with the address
  }
} catch { /* no storage here; then it stays in the address */ }

const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const CONNECT_MS = 10_000;
const LONGEST_PAUSE_MS = 5_000;

/** Something that went wrong, in words for the person in front of the page. `final`: trying again would not help. */
export class Problem extends Error {
  constructor(message, final = false) {
    super(message);
    this.plain = true;
    this.final = final;
  }
}

/** Ask the server; a refusal becomes a Problem. */
export async function ask(path, init = {}) {
  const headers = {...init.headers, ...(token ? {Authorization: `Bearer ${token}`} : {})};
  let response;
  try {
    response = await fetch(path, {signal: AbortSignal.timeout(CONNECT_MS), ...init, headers});
  } catch {
    throw new Problem("The server does not respond. Check that Saccade is running.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const reason = body.error?.message ?? body.error;
  switch (response.status) {
    case 401: throw new Problem("This server requires a token. Add ?token=… to the address of this page.", true);
    case 403: throw new Problem(`The server rejected the request: ${reason}.`, true);
    default: {
      const final = response.status < 500 && response.status !== 404;  // a stream that ended may start again
      const problem = new Problem(`The server returned an error: ${reason || response.statusText}.`, final);
      throw Object.assign(problem, {body});
    }
  }
}

/**
 * A session that sends one track (WHIP) or watches a stream (WHEP), with the data channel "results" beside the video.
 * A stream is watched as MP4 over HTTP if the browser has no WebRTC, or if no WebRTC packet arrives.
 * Reports through `on`: state(state, words), open(), received(message), media(attach). `attach(video)` shows the video.
 */
export class Link {
  #on; #path; #source; #peer = null; #channel = null; #session = null; #wanted = true; #wake = () => {};
  #http = typeof RTCPeerConnection === "undefined"; #live = null; #over = null;

  constructor(path, source, on) {
    this.#path = path;
    this.#source = source;
    this.#on = on;
    this.#run();
    addEventListener("online", this.#hurry);
    addEventListener("pagehide", this.#pause);
  }

  /** Send a message, if the channel is open. */
  send(message) {
    if (this.#live) return this.#change(message);
    if (this.#channel?.readyState !== "open") return false;
    this.#channel.send(JSON.stringify(message));
    return true;
  }

  /** Milliseconds that a message takes to get here (`way`), and that a frame waits here and is decoded (`coding`). */
  async times() {
    const times = {way: 0, coding: 0};
    for (const one of (await this.#peer?.getStats())?.values() ?? []) {
      if (one.type === "candidate-pair" && one.nominated) times.way = 500 * (one.currentRoundTripTime ?? 0);
      if (one.type === "inbound-rtp" && one.framesDecoded > 0) {
        times.coding = 1000 * (one.totalProcessingDelay ?? one.totalDecodeTime ?? 0) / one.framesDecoded;
      }
    }
    return times;
  }

  #change(message) {
    if (Object.keys(message).length) {
      const headers = {"Content-Type": "application/json"};
      ask(`streams/${this.#name}`, {method: "PATCH", headers, body: JSON.stringify(message)})
        .catch((problem) => this.#on.received({error: problem.message}));
    }
    return true;
  }

  /** Name of the watched stream, as in a path. */
  get #name() { return this.#path.match(/^whep\/([^?]*)/)?.[1]; }

  /** End it, for good. */
  close() {
    this.#wanted = false;
    removeEventListener("online", this.#hurry);
    removeEventListener("pagehide", this.#pause);
    this.#drop();
    this.#wake();
  }

  #hurry = () => this.#wake();

  // The browser may keep a page that was left, and with it the response.
  #pause = () => this.#over?.abort();

  async #run() {
    let wait = 500;
    while (this.#wanted) {
      this.#on.state("busy", "connecting…");
      try {
        const {ended} = await this.#connect();
        this.#on.state("live", "live");
        wait = 500;
        await ended;
        if (this.#wanted) this.#on.state("lost", "The connection was lost. Reconnecting…");
      } catch (problem) {
        if (!this.#wanted) break;
        const known = problem instanceof Problem ? problem : new Problem("The browser cannot connect to the server.");
        if (known.blocked && this.#name && playable) {
          this.#http = true;
          this.#drop();
          continue;
        }
        if (known.final) {
          this.#on.state("failed", known.message);
          break;
        }
        this.#on.state("lost", `${known.message} Trying again…`);
      }
      this.#drop();
      await Promise.race([pause(wait), new Promise((done) => { this.#wake = done; })]);
      wait = Math.min(2 * wait, LONGEST_PAUSE_MS);
    }
    this.#drop();
  }

  /** Connect; `ended` resolves when the connection is over. */
  async #connect() {
    if (this.#http) return this.#watchHttp();
    const peer = this.#peer = new RTCPeerConnection();
    if (this.#source) await send(peer, this.#source);
    else peer.addTransceiver("video", {direction: "recvonly"});
    peer.ontrack = ({track, receiver}) => {
      receiver.jitterBufferTarget = 0;  // the newest frame, not the smoothest
      this.#on.media((video) => { video.srcObject = new MediaStream([track]); });
    };
    const channel = this.#channel = peer.createDataChannel("results");
    let end, opened, failed;
    const ended = new Promise((done) => { end = done; });
    const open = new Promise((done, fail) => { [opened, failed] = [done, fail]; });
    channel.onmessage = ({data}) => this.#on.received(JSON.parse(data));
    channel.onopen = opened;
    channel.onclose = end;
    peer.onconnectionstatechange = () => {
      if (["failed", "disconnected", "closed"].includes(peer.connectionState)) end();
    };
    await peer.setLocalDescription();
    const response = await ask(this.#path, {
      method: "POST", headers: {"Content-Type": "application/sdp"}, body: peer.localDescription.sdp,
    });
    this.#session = response.headers.get("Location");
    await peer.setRemoteDescription({type: "answer", sdp: await response.text()});
    const blocked = new Problem("The server is connected, but no video arrives. A firewall can block UDP.");
    blocked.blocked = true;
    const late = setTimeout(() => failed(blocked), CONNECT_MS);
    await open.finally(() => clearTimeout(late));
    this.#on.open();
    return {ended};  // a promise alone would be waited for
  }

  async #watchHttp() {
    if (!this.#name) throw new Problem("This browser cannot send video, because it does not support WebRTC.", true);
    if (!playable) throw new Problem("This browser cannot show live video, because it supports neither WebRTC nor MediaSource.", true);
    const query = this.#path.match(/\?.*/)?.[0] ?? "";
    const over = this.#over = new AbortController();
    const late = setTimeout(() => over.abort(), 1.5 * CONNECT_MS);
    const path = `streams/${this.#name}/live.mp4${query}`;
    const response = await ask(path, {signal: over.signal}).finally(() => clearTimeout(late));
    this.#live = new LiveMp4(response, (message) => this.#on.received(message));
    this.#on.media(this.#live.attach);
    this.#on.open();
    return {ended: this.#live.ended};
  }

  #drop() {
    this.#over?.abort();
    this.#over = this.#live = null;
    if (this.#session) ask(this.#session, {method: "DELETE", keepalive: true}).catch(() => {});
    this.#peer?.close();
    this.#peer = this.#channel = this.#session = null;
  }
}

async function send(peer, stream) {
  const [track] = stream.getVideoTracks();
  const {sender} = peer.addTransceiver(track, {direction: "sendonly", streams: [stream]});
  const parameters = sender.getParameters();
  parameters.degradationPreference = "maintain-resolution";  // or Chromium begins with a quarter of the pixels
  for (const encoding of parameters.encodings) {
    encoding.scaleResolutionDownBy = Math.max(1, (track.getSettings().width ?? 0) / 960);  // boxes come as fractions
    encoding.maxBitrate = 4_000_000;
  }
  await sender.setParameters(parameters).catch(() => {});  // as it is, then
}
