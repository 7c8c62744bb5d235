// The page: where the frames come from, who draws the boxes, and what is shown when something goes wrong.

import {ask, Link, Problem} from "./link.js";
import {Delayed, Paired} from "./match.js";
import {Figures, Prompts} from "./panel.js";
import {Stage} from "./stage.js";

const $ = (id) => document.getElementById(id);
const CAMERA = {width: {ideal: 1280}, height: {ideal: 720}, frameRate: {ideal: 30, max: 30}};
const NOTHING_MS = 4000;  // without a result for so long, a note is shown
const LIST_MS = 3000;

let prompts, stage;
const figures = new Figures();
let now = null;  // what goes on: {kind: "mine" | "watched", stream, link, burnt, matcher, release, heardAt, way}
let again = null;  // what to do when "Try again" is pressed

// ---- where the frames come from

async function useCamera(deviceId) {
  const mine = stop();
  again = () => useCamera(deviceId);
  try {
    if (!navigator.mediaDevices) {
      throw new Problem(
        "Browsers open the camera only on https and on localhost. Open this page as http://localhost, or play a video.",
      );
    }
    status("busy", "asking for the camera…");
    const wanted = {...CAMERA, ...(deviceId ? {deviceId: {exact: deviceId}} : {facingMode: "environment"})};
    const stream = await navigator.mediaDevices.getUserMedia({video: wanted});
    const release = () => stream.getTracks().forEach((track) => track.stop());
    if (mine !== visit) return release();  // something else was chosen meanwhile
    const [track] = stream.getVideoTracks();
    track.onended = () => fail("The camera was unplugged, or taken by another program.");
    publish("camera", track.label || "Camera", stream, release);
    stage.own.srcObject = stream;
    await stage.own.play();
    await listCameras(track.getSettings().deviceId);
  } catch (error) {
    if (mine === visit) fail(cameraTrouble(error));
  }
}

function cameraTrouble(error) {
  switch (error.name) {
    case "NotAllowedError":
      return "The camera is blocked for this page. Allow it beside the address, then try again.";
    case "NotFoundError":
    case "OverconstrainedError":
      return "There is no camera here. Plug one in, or play the demo clip.";
    case "NotReadableError":
    case "AbortError":
      return "The camera does not start. Close any other program that uses it, then try again.";
    default:
      return error instanceof Problem ? error.message : "This browser cannot use the camera.";
  }
}

async function useVideo(url, name, title) {
  const mine = stop();
  again = () => useVideo(url, name, title);
  try {
    const {own} = stage;
    own.src = url;
    own.loop = true;
    await own.play();
    const stream = own.captureStream?.() ?? own.mozCaptureStream?.();
    if (!stream) throw new Problem("This browser cannot send a video: use the camera, or Chrome or Firefox.");
    publish(name, title, stream, () => {});
  } catch (error) {
    const unplayable = "This browser cannot play that video. MP4 with H.264 and WebM work.";
    if (mine === visit) fail(error instanceof Problem ? error.message : unplayable);
  }
}

function useFile(file) {
  if (file) useVideo(URL.createObjectURL(file), "file", file.name);
}

function publish(name, title, source, release) {
  begin(stage.own, {kind: "mine", title, release, matcher: new Delayed()});
  const open = () => now.link.send(prompts.wanted);
  now.link = new Link(`whip?stream=${name}`, source, {state, received, open, track() {}});
  if (burntIn()) stage.burnt = true;
}

function watch(name) {
  stop();
  again = () => watch(name);
  begin(stage.theirs, {kind: "watched", title: name, stream: name, release() {}, matcher: new Paired()});
  look();
}

/** Have a stream's video sent here, with or without boxes in it: always a watched one, one's own only if burnt in. */
function look() {
  stage.burnt = burntIn();
  const path = `whep/${encodeURIComponent(now.stream)}${burntIn() ? "" : "?overlay=off"}`;
  const track = (one) => stage.play(one);
  if (now.kind === "watched") {
    now.link?.close();
    now.link = new Link(path, null, {state, received, track, open: () => now.link.send({})});
  } else {
    now.burnt?.close();
    const heard = (kind, words) => { if (kind === "failed") state(kind, words); };
    now.burnt = burntIn() ? new Link(path, null, {state: heard, received() {}, open() {}, track}) : null;
  }
}

// ---- beginning and end

let visit = 0;  // grows with every choice, so that one that took long knows it is no longer wanted

function begin(video, what) {
  now = {link: null, burnt: null, stream: null, way: 0, heardAt: performance.now(), ...what};
  stage.begin(video, what.matcher);
  $("start").hidden = true;
  for (const one of [$("controls"), $("speed"), $("now")]) one.hidden = false;
  $("source").textContent = what.title;
  hush();
}

function stop() {
  now?.link?.close();
  now?.burnt?.close();
  now?.release();
  now = again = null;
  stage.end();
  figures.clear();
  for (const one of [$("controls"), $("cameras"), $("speed"), $("now"), $("running")]) one.hidden = true;
  $("start").hidden = false;
  hush();
  status("idle", "ready");
  return ++visit;
}

function fail(words) {
  const retry = again;
  stop();
  again = retry;
  status("failed", "stopped");
  notify(words);
}

// ---- what comes back

function state(kind, words) {
  if (kind === "failed") return fail(words);
  status(kind, kind === "lost" ? "connecting again…" : words);
  if (kind === "lost") notify(words, "lost");
  else if (kind === "live" && $("message").dataset.kind === "lost") hush();
}

function received(message) {
  if (!now) return;
  if (message.error) return prompts.refuse(message.error);
  if (message.prompts) return prompts.take(message.prompts, message.colors);
  now.heardAt = performance.now();
  const wanted = (one) => prompts.has(one.label);
  const {objects, points, answers, latency_ms: latency} = message;
  const seen = {objects: objects.filter(wanted), points: points.filter(wanted), answers};
  if (now.kind === "watched") {
    now.matcher.record(message.rtp_timestamp, seen);
    now.link.oneWay().then((ms) => { if (now) now.way = ms; });
    return figures.note(seen, latency, now.way, prompts.color);
  }
  const here = performance.timeOrigin + performance.now();
  // The sender uses this clock. Until the server knows it, a frame is a little older than reported.
  const age = message.capture_clock === "rtcp" ? here - 1000 * message.captured_at : latency.total + 15;
  now.matcher.record(here - age, seen);
  figures.note(seen, latency, Math.max(0, age - latency.total), prompts.color);
  if (now.stream !== message.stream) {  // it has another name after a reconnect
    now.stream = message.stream;
    if (burntIn()) look();
  }
}

function watchSilence() {
  if (!now) return;
  const silent = performance.now() - now.heardAt > NOTHING_MS && $("status").dataset.state === "live";
  if (silent && $("message").hidden) {
    notify("No results come: the stream stands still, or the model is busy with others.", "silent");
  } else if (!silent && $("message").dataset.kind === "silent") {
    hush();
  }
}

// ---- notes

function status(kind, words) {
  $("status").dataset.state = kind;
  $("status").querySelector("span").textContent = words;
}

/** Show a note over the frame; with buttons if nothing more is tried. */
function notify(words, kind = "failed") {
  const box = $("message");
  box.dataset.kind = kind;
  box.querySelector("p").textContent = words;
  $("retry").hidden = kind !== "failed" || !again;
  $("dismiss").hidden = kind !== "failed";
  box.hidden = false;
}

function hush() {
  $("message").hidden = true;
  $("message").dataset.kind = "";
}

// ---- what can be pressed

const burntIn = () => document.querySelector("[name=view]:checked").value === "burnt";

async function listCameras(chosen) {
  const cameras = (await navigator.mediaDevices.enumerateDevices()).filter((one) => one.kind === "videoinput");
  const select = $("cameras").querySelector("select");
  select.replaceChildren(...cameras.map(({label, deviceId}, number) => {
    const textContent = label || `Camera ${number + 1}`;
    return Object.assign(document.createElement("option"), {value: deviceId, textContent});
  }));
  select.value = chosen;
  $("cameras").hidden = cameras.length < 2;
}

async function listStreams() {
  if (now || document.hidden) return;
  try {
    const {streams} = await (await ask("streams")).json();
    $("running").hidden = !streams.length;
    $("streams").replaceChildren(...streams.map(({name, ok, state: how}) => {
      const button = Object.assign(document.createElement("button"), {className: "plain", onclick: () => watch(name)});
      const light = Object.assign(document.createElement("i"), {className: ok ? "ok" : ""});
      button.append(light, name);
      button.title = how;
      const item = document.createElement("li");
      item.append(button);
      return item;
    }));
    if ($("message").dataset.kind === "lost") hush();
  } catch (problem) {
    notify(problem.message, "lost");
  }
}

async function snapshot() {
  const png = await stage.snapshot();
  if (!png) return;
  const name = `saccade ${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.png`;
  const link = Object.assign(document.createElement("a"), {href: URL.createObjectURL(png), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  $("announcement").textContent = "Snapshot saved";
}

function listen() {
  $("use-camera").onclick = () => useCamera();
  $("use-clip").onclick = () => useVideo("clip.mp4", "clip", "Demo clip");
  $("use-file").onclick = () => $("file").click();
  $("file").onchange = ({target}) => {
    useFile(target.files[0]);
    target.value = "";
  };
  $("cameras").querySelector("select").onchange = ({target}) => useCamera(target.value);
  for (const input of document.querySelectorAll("[name=view]")) input.onchange = () => { if (now?.stream) look(); };
  $("snapshot").onclick = snapshot;
  $("stop").onclick = () => {
    stop();
    $("use-camera").focus();
  };
  $("retry").onclick = () => again?.();
  $("dismiss").onclick = () => stop();
  addEventListener("keydown", (event) => {
    if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey || !now) return;
    if (event.key === "s") snapshot();
    if (event.key === "Escape") $("stop").click();
    if (event.key === "/") {
      event.preventDefault();
      $("name").focus();
    }
  });
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
    addEventListener(kind, (event) => {
      event.preventDefault();
      document.body.classList.toggle("dropping", kind === "dragenter" || kind === "dragover");
      if (kind === "drop") useFile(event.dataTransfer.files[0]);
    });
  }
  addEventListener("pagehide", () => now?.link?.close());
}

async function open() {
  if (!("requestVideoFrameCallback" in HTMLVideoElement.prototype)) {
    return notify("This browser is too old for this page. Any of the last two years will do.");
  }
  let model;
  while (!model) {
    try {
      model = await (await ask("model")).json();
    } catch (problem) {
      notify(problem.message, "lost");
      if (problem.final) return;
      await new Promise((done) => setTimeout(done, LIST_MS));
    }
  }
  hush();
  $("model").textContent = `${model.model} on ${model.device}`;
  prompts = new Prompts(model, () => now?.link?.send(prompts.wanted));
  stage = new Stage(prompts.color);
  window.saccade = {stage};  // for tests and the curious
  listen();
  status("idle", "ready");
  listStreams();
  setInterval(listStreams, LIST_MS);
  setInterval(watchSilence, 500);
}

open();
