// The page: where the frames come from, who draws the boxes, and what is shown when something goes wrong.

import {Question, findIn} from "./ask.js";
import {cameraTrouble, listCameras, openCamera} from "./camera.js";
import {Heat} from "./heat.js";
import {Intro} from "./video/intro.js";
import {ask, Link, Problem} from "./video/link.js";
import {Delayed, Paired, Still} from "./video/match.js";
import {hush, notify as note, save, status} from "./notes.js";
import {Prompts} from "./panel.js";
import {Ptz} from "./ptz.js";
import {Recordings} from "./recording.js";
import {Rules} from "./rules/rules.js";
import {offerSaving} from "./rules/saving.js";
import {Figures} from "./speed.js";
import {Timeline} from "./timeline.js";
import {Stage} from "./video/stage.js";
import * as views from "./views.js";
import {Wall, streamButton} from "./wall.js";
import {Regions} from "./zones.js";

const $ = (id) => document.getElementById(id);
const NOTHING_MS = 4000;  // without a result for so long, a note is shown
const LIST_MS = 3000;

let prompts, stage, intro, question, wall, timeline, recordings, model;
let names = [];  // of the streams
let panels = {};  // what shows the stream in view besides its video
const figures = new Figures();
let now = null;  // what goes on: {kind: "mine" | "watched" | "image", stream, link, burnt, matcher, release, heardAt}
let again = null;  // what to do when "Try again" is pressed

// ---- where the frames come from

async function useCamera(deviceId) {
  const mine = stop();
  again = () => useCamera(deviceId);
  try {
    status("busy", "asking for the camera…");
    const stream = await openCamera(deviceId);
    const release = () => stream.getTracks().forEach((track) => track.stop());
    if (mine !== visit) return release();  // something else was chosen meanwhile
    const [track] = stream.getVideoTracks();
    track.onended = () => fail("The camera was disconnected, or another program uses it.");
    publish("camera", track.label || "Camera", stream, release);
    stage.own.srcObject = stream;
    await stage.own.play();
    await listCameras(track.getSettings().deviceId);
  } catch (error) {
    if (mine === visit) fail(cameraTrouble(error));
  }
}

async function useVideo(url, name, title) {
  const mine = stop();
  again = () => useVideo(url, name, title);
  try {
    const {own} = stage;
    Object.assign(own, {src: url, loop: true});
    await own.play();
    if (!own.videoWidth) throw new Problem("This file contains only audio. Choose a video file.");
    const stream = own.captureStream?.() ?? own.mozCaptureStream?.();
    if (!stream) throw new Problem("This browser cannot stream a video file. Use the camera, or open this page in Chrome or Firefox.");
    publish(name, title, stream, () => {});
  } catch (error) {
    const unplayable = "This browser cannot play this video. Use MP4 with H.264, WebM or an image.";
    if (mine === visit) fail(error instanceof Problem ? error.message : unplayable);
  }
}

function useFile(file) {
  if (file?.type.startsWith("image/")) useImage(file);
  else if (file) useVideo(URL.createObjectURL(file), "file", file.name);
}

async function useImage(file) {
  const mine = stop();
  again = () => useImage(file);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    return fail("This browser cannot show this image. Use JPEG, PNG or WebP.");
  }
  if (mine !== visit) return bitmap.close();
  begin(null, {kind: "image", title: file.name, bitmap, release() {}, matcher: new Still(bitmap)});
  findInImage();
}

/** Find what is wanted in the image on the stage. */
async function findInImage() {
  const {bitmap, matcher} = now;
  const asked = now.asked = {};  // the newest question alone is answered
  status("busy", "searching…");
  try {
    const seen = await findIn(bitmap, prompts.wanted);
    if (now?.asked !== asked) return;
    matcher.record(seen);
    status("live", "done");
    hush();
  } catch (problem) {
    if (now?.asked === asked) notify(problem.message);
  }
}

function publish(name, title, source, release) {
  begin(stage.own, {kind: "mine", title, release, matcher: new Delayed(), times: {way: 0, coding: 0}});
  const open = () => now.link.send(prompts.wanted);
  now.link = new Link(`whip?stream=${name}`, source, {state, received, open, media() {}});
  if (burntIn()) stage.burnt = true;
}

function watch(name) {
  stop();
  again = () => restart(name);
  const times = {way: 0, coding: 0};
  begin(stage.theirs, {kind: "watched", title: name, stream: name, release() {}, matcher: new Paired(), times});
  look();
  for (const panel of Object.values(panels)) panel.open(name);
}

/** Watch a stream again; one that has failed for good is started anew first. */
async function restart(name) {
  const mine = visit;
  try {
    const {state: how} = await (await ask(`streams/${encodeURIComponent(name)}`)).json();
    if (how === "failed") await ask(`streams/${encodeURIComponent(name)}/restart`, {method: "POST"});
  } catch (problem) {
    return mine === visit && notify(problem.message);
  }
  if (mine === visit) watch(name);  // it may have been left meanwhile
}

/** Why there is nothing to see of a stream, in words; "" if the server does not say. */
async function cause(name) {
  try {
    const {state: how, ok, reason, detail} = await (await ask(`streams/${encodeURIComponent(name)}`)).json();
    if (ok) return "";
    const tried = how === "failed" ? "The stream has ended." : "Saccade reconnects automatically.";
    return `${name}: ${[reason ?? how, detail].filter(Boolean).join(": ")}. ${tried}`;
  } catch {
    return "";
  }
}

/** Have a stream's video sent here, with or without boxes in it: always a watched one, one's own only if burnt in. */
function look() {
  stage.burnt = burntIn();
  const path = `whep/${encodeURIComponent(now.stream)}${burntIn() ? "" : "?overlay=off"}`;
  const media = (attach) => stage.play(attach);
  if (now.kind === "watched") {
    now.link?.close();
    now.link = new Link(path, null, {state, received, media, open: () => now.link.send({})});
  } else {
    now.burnt?.close();
    const heard = (kind, words) => { if (kind === "failed") state(kind, words); };
    now.burnt = burntIn() ? new Link(path, null, {state: heard, received() {}, open() {}, media}) : null;
  }
}

// ---- beginning and end

let visit = 0;  // grows with every choice, so that one that took long knows it is no longer wanted

function begin(video, what) {
  now = {link: null, burnt: null, stream: null, heardAt: performance.now(), ...what};
  intro.stop();
  stage.begin(video, what.matcher);
  $("start").hidden = true;
  for (const id of ["controls", "now"]) $(id).hidden = false;
  for (const id of ["speed", "view", "freeze"]) $(id).hidden = what.kind === "image";
  const from = what.kind === "mine" ? "the camera" : "the frame’s arrival";
  $("delay").textContent = `latency from ${from} to the box on the screen`;
  $("ask").hidden = !model.talks;
  $("source").textContent = what.title;
  if (what.kind !== "watched") show("live");
  hush();
}

function stop() {
  now?.link?.close();
  now?.burnt?.close();
  now?.release();
  now = again = null;
  stage.end();
  figures.clear();
  question.clear();
  for (const panel of Object.values(panels)) panel.close();
  freeze(false);
  for (const id of ["controls", "cameras", "speed", "now", "ask", "windows"]) $(id).hidden = true;
  $("start").hidden = !model.publish;
  hush();
  status("idle", "ready");
  if (!$("live").hidden && model.publish) intro.start();
  return ++visit;
}

/** Back to where a stream was chosen. */
function leave() {
  if (now?.kind === "watched" && location.hash.length > 2) history.back();
  else stop();
}

/** Where "Live" leads on a server that takes no video from this page: to the only stream, or to all. */
function goToStreams() {
  location.replace(names.length === 1 ? `#/stream/${encodeURIComponent(names[0])}` : "#/wall");
}

function fail(words) {
  const retry = again;
  stop();
  again = retry;
  status("failed", "stopped");
  notify(words);
}

// ---- what comes back

async function state(kind, words) {
  if (kind === "failed") return fail(words);
  status(kind, kind === "lost" ? "reconnecting…" : words);
  if (kind === "lost") {
    const mine = visit;
    const reason = now?.kind === "watched" ? await cause(now.stream) : "";
    if (mine === visit && $("status").dataset.state !== "live") notify(reason || words, "lost");
  } else if (kind === "live" && $("message").dataset.kind === "lost") hush();
}

function received(message) {
  if (!now) return;
  if (message.error) return prompts.refuse(message.error);
  if (message.prompts) return prompts.take(message.prompts, message.colors);
  now.heardAt = performance.now();
  const wanted = (one) => prompts.has(one.label);
  const {objects, points, segments, answers, latency_ms: latency} = message;
  const seen = {objects: objects.filter(wanted), points: points.filter(wanted), segments, answers};
  if (message.looks) $("windows").hidden = false;
  if (windowed()) seen.looks = message.looks;
  now.link.times().then((times) => { if (now) now.times = times; });
  const {way, coding} = now.times;
  panels.regions.counted(message);
  if (now.kind === "watched") {
    now.matcher.record(message.rtp_timestamp, seen);
    return figures.note(latency, way, coding);
  }
  const here = performance.timeOrigin + performance.now();
  // The sender uses this clock. Until the server knows it, a frame is a little older than reported.
  const age = message.capture_clock === "rtcp" ? here - 1000 * message.captured_at : latency.total + 15;
  now.matcher.record(here - age, seen);
  figures.note(latency, 2 * way, Math.max(0, age - latency.total - 2 * way));
  if (now.stream !== message.stream) {  // it has another name after a reconnect
    now.stream = message.stream;
    for (const panel of Object.values(panels)) panel.open(now.stream);
    if (burntIn()) look();
  }
}

function watchSilence() {
  if (!now || now.kind === "image") return;
  const silent = performance.now() - now.heardAt > NOTHING_MS && $("status").dataset.state === "live";
  if (silent && $("message").hidden) {
    notify("No results arrive: the stream has stopped, or the model is busy with other streams.", "silent");
  } else if (!silent && $("message").dataset.kind === "silent") {
    hush();
  }
}

/** Show a note over the frame; a stream that is watched can be left meanwhile. */
function notify(words, kind = "failed") {
  note(words, kind, {final: kind === "failed" || (kind === "lost" && now?.kind === "watched"), again: Boolean(again)});
}

// ---- what can be pressed

const burntIn = () => document.querySelector("[name=view]:checked").value === "burnt";

/** Whether the windows that the model looked at again are drawn. */
const windowed = () => $("windows").ariaPressed === "true";

const toggleWindows = () => $("windows").setAttribute("aria-pressed", !windowed());

async function listStreams() {
  if (document.hidden) return;
  try {
    const {streams} = await (await ask("streams")).json();
    wall.update(streams, model.events && wall.shown ? (await (await ask("events?limit=50")).json()).events : []);
    names = streams.map(({name}) => name);
    timeline.streams = names;
    await recordings.offer(names);
    const mine = streams.find(({name}) => name === now?.stream);
    if (mine) figures.drops(mine);
    const others = streams.filter(({name}) => name !== now?.stream);
    $("running").hidden = !others.length;
    $("streams").replaceChildren(...others.map(streamButton));
    if ($("message").dataset.kind === "lost" && !now) hush();
  } catch (problem) {
    if (!now) notify(problem.message, "lost");
  }
}

/** Hold what is on the screen, or go on. */
function freeze(wanted) {
  if (wanted && !(stage.shown || burntIn())) return;
  stage.frozen = wanted;
  $("freeze").setAttribute("aria-pressed", wanted);
  const time = new Date().toLocaleTimeString([], {hour12: false});
  const words = `Frozen at ${time}; the boxes belong to this frame`;
  $("caption").textContent = wanted ? words : "";
  $("caption").hidden = !wanted;
}

async function snapshot() {
  const png = await stage.snapshot();
  if (png) save(png);
}

function listen() {
  $("use-camera").onclick = () => useCamera();
  $("use-clip").onclick = () => useVideo("clip.mp4", "clip", "Demo clip");
  $("use-file").onclick = () => $("file").click();
  $("file").onchange = ({target}) => { useFile(target.files[0]); target.value = ""; };
  $("cameras").querySelector("select").onchange = ({target}) => useCamera(target.value);
  for (const input of document.querySelectorAll("[name=view]")) input.onchange = () => { if (now?.stream) look(); };
  $("snapshot").onclick = snapshot;
  $("windows").onclick = toggleWindows;
  $("freeze").onclick = () => freeze(!stage.frozen);
  $("stop").onclick = () => {
    leave();
    $("use-camera").focus();
  };
  $("retry").onclick = () => again?.();
  $("dismiss").onclick = leave;
  addEventListener("hashchange", route);
  addEventListener("resize", () => stage.redraw());
  addEventListener("keydown", (event) => {
    if (event.target.matches?.("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.defaultPrevented || $("live").hidden || !now) return;
    if (event.key === "s") snapshot();
    if (event.key === "f") freeze(!stage.frozen);
    if (event.key === "h") panels.heat.toggle();
    if (event.key === "w" && !$("windows").hidden) toggleWindows();
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
    return notify("This browser is too old. Use a version from the last two years.");
  }
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
  document.body.dataset.role = model.role ?? "viewer";
  $("model").textContent = model.model ? `${model.model} on ${model.device}` : "";
  prompts = new Prompts(model, changed);
  stage = new Stage(prompts.color, () => figures.frame(), (record) => figures.shown(record, prompts.color));
  intro = new Intro($("intro"), prompts.color);
  panels = {regions: new Regions(), rules: new Rules(), heat: new Heat(), ptz: new Ptz()};
  offerSaving(model.saves);
  wall = new Wall($("tiles"), prompts.color);
  timeline = new Timeline(prompts.color);
  recordings = new Recordings();
  document.querySelector("[data-view=events]").hidden = !model.events;
  question = new Question(() => stage.snapshot({plain: true}));
  window.saccade = {stage};  // for tests and the curious
  listen();
  status("idle", "ready");
  $("start").hidden = !model.publish;
  if (model.publish) route();  // at once: it stops what was chosen before
  else if (!location.hash) location.replace("#/wall");
  await listStreams();
  if (!model.publish) route();
  setInterval(listStreams, LIST_MS);
  setInterval(watchSilence, 500);
}

/** What to find has been changed on the page. */
function changed() {
  if (now?.kind === "image") findInImage();
  else now?.link?.send(prompts.wanted);
}

// ---- the views

function show(view) {
  views.show(view);
  wall.shown = view === "wall";
  timeline.shown = view === "events";
  recordings.shown = view === "recording";
}

function route() {
  const {view, stream, recorded, time} = views.asked();
  if (view === "live" && !stream && !model.publish) return goToStreams();
  show(view);
  if (view === "recording") recordings.open(recorded, time);
  if (stream) {
    if (now?.stream !== stream) watch(stream);
  } else if (view !== "live") {
    if (now) stop();
    intro.stop();
  } else if (!now || now.kind === "watched") {
    stop();
  }
}

open();
