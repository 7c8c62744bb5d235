// What the page says about itself: the state at the top, and a note over the frame.

const $ = (id) => document.getElementById(id);

/** Show a state: idle, busy, live, lost or failed. */
export function status(kind, words) {
  $("status").dataset.state = kind;
  $("status").querySelector("span").textContent = words;
}

/** Show a note over the frame; with buttons to try again, if that can be done, and to go back, if it is `final`. */
export function notify(words, kind = "failed", {final = kind === "failed", again = false} = {}) {
  const box = $("message");
  box.dataset.kind = kind;
  box.querySelector("p").textContent = words;
  $("retry").hidden = !final || !again;
  $("dismiss").hidden = !final;
  box.hidden = false;
}

export function hush() {
  $("message").hidden = true;
  $("message").dataset.kind = "";
}

/** Save a PNG as a file. */
export function save(png) {
  const name = `saccade ${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.png`;
  const link = Object.assign(document.createElement("a"), {href: URL.createObjectURL(png), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  $("announcement").textContent = "Snapshot saved";
}
