/** Start of the page: its parts by the fragment of the URL, and the question for the API key. */
import { ApiSource } from "page/api.js";
import { fill, h, openDialog } from "page/dom.js";
import { EmbeddedSource } from "page/embedded.js";
import { groupPage } from "page/list/group.js";
import { listPage } from "page/list/list.js";
import { rolloutPage } from "page/rollout/rollout.js";

const PATIENCE_MS = 1000;

const main = document.querySelector("main");
const intro = document.getElementById("intro");
const saved = document.getElementById("rollouts");
const source = saved ? new EmbeddedSource(JSON.parse(saved.textContent)) : new ApiSource(askForKey);
let closing = new AbortController();

function show() {
  const [path, query] = location.hash.startsWith("#/") ? location.hash.slice(1).split("?") : [""];
  const [kind, id] = place(path);
  const parameters = new URLSearchParams(query);
  closing.abort();
  closing = new AbortController();
  const { signal } = closing;
  const shown = kind === "rollouts" && id ? rolloutPage(source, id, parameters, signal)
    : kind === "groups" && id ? groupPage(source, id, signal)
    : listPage(source, parameters, signal);
  if (intro) intro.hidden = Boolean(kind);
  document.title = shown.title;
  fill(main, shown.element);
}

/** The kind and the id of what a link shows. A document with one rollout begins with it. */
function place(path) {
  const parts = decoded(path).filter(Boolean);
  return parts.length || !source.only || intro ? parts : ["rollouts", source.only];
}

/** The parts of a path; none if it is not percent-encoded text. */
function decoded(path) {
  try {
    return path.split("/").map(decodeURIComponent);
  } catch {
    return [];
  }
}

function navigate() {
  // Other fragments, such as that of "Skip to the content", name a place on this page.
  if (location.hash && !location.hash.startsWith("#/")) return;
  show();
  main.focus({ preventScroll: true });
}

function askForKey(refusal) {
  return new Promise((resolve) => {
    const properties = { type: "password", name: "key", required: true, autocomplete: "off", "aria-label": "API key" };
    const input = h("input", properties);
    let isAnswered = false;
    const submit = (event) => {
      event.preventDefault();
      isAnswered = true;
      dialog.close();
      resolve(input.value.trim());
    };
    const dialog = openDialog("Authentication", h("form", { on: { submit } },
      h("h2", {}, "API key"),
      h("p", {}, "This server requires an API key. It stays in this tab and is forgotten when you close the tab."),
      refusal && h("p.error", { role: "alert" }, refusal),
      input,
      h("button", {}, "Continue")));
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    // Browsers close a dialog on repeated Escape all the same.
    dialog.addEventListener("close", () => {
      if (isAnswered) return;
      document.body.append(dialog);
      dialog.showModal();
    });
  });
}

// Learn first what the server allows. One that is away is reported by what is shown.
await Promise.race([source.server().catch(() => {}), new Promise((resolve) => setTimeout(resolve, PATIENCE_MS))]);
document.querySelector("header nav")?.toggleAttribute("hidden", Boolean(source.readOnly));
addEventListener("hashchange", navigate);
document.querySelector(".skip")?.addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
show();
