// The page: two views, the key, and what happens when the server becomes ready.

import { access, baseUrl, getJson, hasKey, setKey } from "./api.js";
import { startChat } from "./chat.js";
import { $, element, setText } from "./dom.js";
import { showPlan } from "./plan.js";
import { startStatus } from "./status.js";

let model = "";

async function showModel() {
  const { data } = await getJson("v1/models");
  model = data[0].id;
  setText($("model"), model);
  $("model").title = model;
  document.title = `${model} · Pellucid`;
}

async function load() {
  try {
    await showModel();
    showPlan($("plan-body"), await getJson("plan"));
  } catch (error) {
    $("plan-body").replaceChildren(element("p", { class: "error" }, error.message));
  }
}

/** On narrow screens one view is shown at a time; the address says which. */
function showView() {
  const view = location.hash === "#plan" ? "plan" : "chat";
  document.body.dataset.view = view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

addEventListener("hashchange", showView);
showView();
// A link carries no key.
$("plan-link").hidden = hasKey();
setText($("base-url"), baseUrl);
startChat(() => model);
const poll = startStatus(load);

access.addEventListener("unauthorized", () => {
  if (!$("key-form").hidden) return;
  if (hasKey()) setText($("key-hint"), "The server does not accept this key. Another one?");
  $("key-form").hidden = false;
});
access.addEventListener("key", () => {
  $("key-form").hidden = true;
  $("plan-link").hidden = true;
  if (document.body.dataset.status === "ready") load();
  poll();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key").value);
  $("key").value = "";
});
