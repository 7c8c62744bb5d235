// The cameras of this device.

import {Problem} from "./video/link.js";

const $ = (id) => document.getElementById(id);
const WANTED = {width: {ideal: 1280}, height: {ideal: 720}, frameRate: {ideal: 30, max: 30}};

/** The stream of a camera: of one, or of whichever the browser prefers. */
export function openCamera(deviceId) {
  if (!navigator.mediaDevices) {
    throw new Problem(
      "Browsers allow a camera only on https pages and on localhost. Open this page at http://localhost, or use a video.",
    );
  }
  const which = deviceId ? {deviceId: {exact: deviceId}} : {facingMode: "environment"};
  return navigator.mediaDevices.getUserMedia({video: {...WANTED, ...which}});
}

/** Let another camera be chosen, if there is one. */
export async function listCameras(chosen) {
  const cameras = (await navigator.mediaDevices.enumerateDevices()).filter((one) => one.kind === "videoinput");
  const select = $("cameras").querySelector("select");
  select.replaceChildren(...cameras.map(({label, deviceId}, number) => {
    const textContent = label || `Camera ${number + 1}`;
    return Object.assign(document.createElement("option"), {value: deviceId, textContent});
  }));
  select.value = chosen;
  $("cameras").hidden = cameras.length < 2;
}

/** What went wrong with a camera, in plain words. */
export function cameraTrouble(error) {
  switch (error.name) {
    case "NotAllowedError":
      return "The camera is blocked for this page. Allow it in the address bar, then try again.";
    case "NotFoundError":
    case "OverconstrainedError":
      return "No camera was found. Connect one, or play the demo clip.";
    case "NotReadableError":
    case "AbortError":
      return "The camera cannot be started. Close other programs that use the camera, then try again.";
    default:
      return error.plain ? error.message : "This browser cannot use the camera.";
  }
}
