// Shows one of the streams as the server draws it; #NAME in the address selects it.

import {ask, Link} from "./link.js";

const $ = (id) => document.getElementById(id);
const LIST_MS = 3000;
let link = null, name = null;

function notify(words) {
  $("message").hidden = !words;
  $("message").querySelector("p").textContent = words;
}

function state(kind, words) {
  $("status").dataset.state = kind;
  const short = {lost: "connecting again…", failed: "stopped"}[kind];
  $("status").querySelector("span").textContent = short ?? words;
  notify(short ? words : "");
}

function watch(stream) {
  if (stream === name) return;
  link?.close();
  name = stream;
  location.hash = encodeURIComponent(stream);
  document.title = `${stream} · Saccade`;
  link = new Link(`whep/${encodeURIComponent(stream)}`, null, {state, open() {}, received() {}, track(track) {
    $("theirs").srcObject = new MediaStream([track]);
    $("theirs").play().catch(() => {});
  }});
}

async function list() {
  try {
    const {streams} = await (await ask("streams")).json();
    const names = streams.map((stream) => stream.name);
    const wanted = decodeURIComponent(location.hash.slice(1));
    if (!name && !names.length) notify("No frame has come yet. This page shows the first one by itself.");
    else if (!name) watch(names.includes(wanted) ? wanted : names[0]);
    $("streams").replaceChildren(...names.map((stream) => {
      const button = document.createElement("button");
      Object.assign(button, {className: "plain", textContent: stream, onclick: () => watch(stream)});
      button.setAttribute("aria-pressed", stream === name);
      const item = document.createElement("li");
      item.append(button);
      return item;
    }));
  } catch (problem) {
    if (!name) state(problem.final ? "failed" : "lost", problem.message);
    if (problem.final) return;
  }
  setTimeout(list, LIST_MS);
}

$("theirs").onresize = ({target}) => {
  $("stage").style.setProperty("--aspect", `${target.videoWidth} / ${target.videoHeight}`);
  $("stage").style.setProperty("--wide", target.videoWidth / target.videoHeight);
};
addEventListener("hashchange", () => watch(decodeURIComponent(location.hash.slice(1))));
addEventListener("pagehide", () => link?.close());
list();
