// The views of the page and their addresses: #/ and #/stream/NAME, #/wall, #/events, #/recording/NAME/TIME.

const TITLES = {wall: "All streams", events: "Events", recording: "Recording"};

/** What the address asks for: {view, stream}; of a recording {view, recorded, time}. */
export function asked() {
  const [, view, name, time] = location.hash.split("/");
  const stream = view === "stream" && name ? decodeURIComponent(name) : null;
  document.title = `${stream ?? TITLES[view] ?? "Live"} · Saccade`;
  const recorded = view === "recording" && name ? decodeURIComponent(name) : null;
  return {view: view in TITLES ? view : "live", stream, recorded, time: Number(time) || null};
}

/** Show a view, and no other. */
export function show(view) {
  for (const one of document.querySelectorAll(".view")) one.hidden = one.id !== view;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}
