// The views of the page and their addresses: #/ and #/stream/NAME, #/wall, #/events.

const TITLES = {wall: "All streams", events: "Events"};

/** What the address asks for: {view, stream}. */
export function asked() {
  const [, view, name] = location.hash.split("/");
  const stream = view === "stream" && name ? decodeURIComponent(name) : null;
  document.title = `${stream ?? TITLES[view] ?? "Live"} · Saccade`;
  return {view: view in TITLES ? view : "live", stream};
}

/** Show a view, and no other. */
export function show(view) {
  for (const one of document.querySelectorAll(".view")) one.hidden = one.id !== view;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}
