// Has the server write zones, lines and rules into its configuration file.

import {ask} from "../video/link.js";

const $ = (id) => document.getElementById(id);

/** Make the button work; shown where there is a file that may be written. */
export function offerSaving(saves) {
  $("saving").hidden = !saves;
  $("save").onclick = async () => {
    try {
      const {file} = await (await ask("config/save", {method: "POST"})).json();
      $("announcement").textContent = `Saved to ${file}`;
      $("save").textContent = `Saved to ${file}`;
      setTimeout(() => { $("save").textContent = "Save to file"; }, 2500);
      problem("");
    } catch ({message}) {
      problem(message);
    }
  };
}

function problem(words) {
  $("save-problem").textContent = words;
  $("save-problem").hidden = !words;
}
