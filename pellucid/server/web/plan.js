// The plan as tables: every decision with how it came about, what was not taken, the memory bill. Filled by app.js.

import { element, formatBytes } from "./dom.js";

// Reasons that put a candidate out of the question; the near ones come first.
const FAR_OFF = ["attention", "device", "phase"];
const PREFERENCE = ["slower", "order", "not_asked"];

export function showPlan(container, { plan, notes = [] }) {
  container.replaceChildren(
    element("h2", {}, "Plan"),
    element("p", { class: "soft" }, "What the engine runs on, and why. Decided once, before the weights were read."),
    ...blockers(plan.blockers),
    facts("Model", [...plan.model, ...notes.map((note) => `note: ${note}`)]),
    facts("Machine", plan.hardware),
    element("h3", { id: "decisions" }, "Decisions"),
    decisionTable(plan.decisions),
    element("h3", { id: "memory" }, "Memory of one rank"),
    element("p", { class: "soft" }, `${formatBytes(plan.memory.budget_bytes)}: ${plan.memory.budget_formula}`),
    budgetBar(plan.memory),
    memoryTable(plan.memory),
  );
}

function facts(title, lines) {
  return element("div", { class: "facts" }, element("h3", {}, title), list(lines));
}

function list(lines) {
  return element("ul", {}, ...lines.map((line) => element("li", {}, line)));
}

function blockers(misfits) {
  if (!misfits?.length) return [];
  const items = misfits.map((misfit) => element("li", {}, ...misfitText(misfit)));
  return [element("div", { class: "blockers" }, element("h3", {}, "Would not start"), element("ul", {}, ...items))];
}

/** Roles are said outright: on narrow screens rows become blocks, which would take them away. */
function table(labelledBy, titles, rows) {
  const headers = titles.map((title) => element("th", { role: "columnheader", scope: "col" }, title));
  return element(
    "table",
    { role: "table", "aria-labelledby": labelledBy },
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...headers)),
    element("tbody", { role: "rowgroup" }, ...rows),
  );
}

function cell(attributes, ...children) {
  return element("td", { role: "cell", ...attributes }, ...children);
}

function decisionTable(decisions) {
  return table("decisions", ["Decision", "Value", "How", "Because"], group(decisions).flatMap(decisionRows));
}

// Reasons that rest on measurement: their figures differ from bucket to bucket.
const MEASURED = ["numerics", "slower", "order"];

/** Runs of decisions that differ in nothing but the bucket and what was measured there. */
function group(decisions) {
  const runs = [];
  let previous = "";
  for (const decision of decisions) {
    const content = JSON.stringify({ ...decision, bucket: null, ...withoutFigures(decision) });
    if (content === previous) runs.at(-1).push(decision);
    else runs.push([decision]);
    previous = content;
  }
  return runs;
}

function withoutFigures({ measured = [], because, rejected }) {
  if (!measured.length) return {};
  const lasting = rejected.map((r) => ({ ...r, misfits: r.misfits.filter((m) => !MEASURED.includes(m.kind)) }));
  return { measured: true, because: because.toSpliced(1, 1), rejected: lasting };
}

let rows = 0;

function decisionRows(run) {
  const [first, last] = [run[0], run.at(-1)];
  const measured = first.measured?.length > 0;
  // The verdict has one bucket's figures; of several, the table has them all.
  const reasons = measured && run.length > 1 ? first.because.toSpliced(1, 1) : first.because;
  const because = cell({ class: "because" }, ...reasons.map((reason) => element("p", {}, reason)));
  if (measured) because.append(measuredTable(run));
  const row = element(
    "tr",
    { role: "row" },
    element("th", { role: "rowheader", scope: "row" }, first.op, bucketRange(first, last)),
    cell({ class: first.value === null ? "value missing" : "value" }, valueText(first.value)),
    cell({}, element("span", { class: "how", "data-how": first.how }, first.how)),
    because,
  );
  if (!first.rejected.length) return [row];
  const id = `rejected-${(rows += 1)}`;
  const toggle = element("button", { type: "button", "aria-expanded": "false", "aria-controls": id });
  toggle.append(`${first.rejected.length} not taken`);
  because.append(toggle);
  const details = element("tr", { role: "row", class: "rejected", id, hidden: "" });
  toggle.addEventListener("click", () => {
    if (!details.hasChildNodes()) details.append(cell({ colspan: "4" }, rejectionList(first.rejected)));
    details.hidden = !details.hidden;
    toggle.setAttribute("aria-expanded", String(!details.hidden));
  });
  return [row, details];
}

function bucketRange(first, last) {
  if (first.bucket === null) return null;
  const range = first === last ? `${first.bucket}` : `${first.bucket}–${last.bucket}`;
  return element("span", { class: "range" }, range === "1" ? "1 token" : `${range} tokens`);
}

function valueText(value) {
  if (value === null) return "nothing";
  if (typeof value === "boolean") return value ? "on" : "off";
  return String(value);
}

/** Medians with half of their 95 % interval, a row a bucket; the one that was taken is marked. */
function measuredTable(run) {
  const names = [...new Set(run.flatMap((decision) => decision.measured.map((one) => one.candidate)))];
  const body = run.map((decision) => {
    const cells = names.map((name) => {
      const found = decision.measured.find((one) => one.candidate === name);
      return cell({ class: name === decision.value ? "taken" : null }, found ? measuredText(found) : "-");
    });
    return element("tr", { role: "row" }, cell({}, `${decision.bucket}`), ...cells);
  });
  const made = table(null, ["tokens", ...names], body);
  made.className = "measured";
  made.setAttribute("aria-label", `Measured times of ${run[0].op}`);
  return element("div", { class: "scroll", tabindex: "0" }, made);
}

function measuredText({ seconds, error, right, detail, taken_back: takenBack }) {
  if (!right) return detail ? `wrong: ${detail}` : "wrong";
  const time = `${(seconds * 1e6).toFixed(1)} ± ${(error * 1e6).toFixed(1)} µs`;
  return takenBack ? element("span", { title: takenBack }, `${time}, taken back`) : time;
}

function rejectionList(rejected) {
  const far = (rejection) => rejection.misfits.some((misfit) => FAR_OFF.includes(misfit.kind));
  const ordered = [...rejected.filter((r) => !far(r)), ...rejected.filter(far)];
  const terms = ordered.flatMap((rejection) => [
    element("dt", {}, rejection.candidate, element("span", { class: "standing" }, standing(rejection))),
    ...rejection.misfits.map((misfit) => element("dd", {}, ...misfitText(misfit))),
    ...rejection.notes.map((note) => element("dd", { class: "note" }, note)),
  ]);
  return element("dl", {}, ...terms);
}

function standing(rejection) {
  const prevents = rejection.misfits.filter((misfit) => !PREFERENCE.includes(misfit.kind));
  if (!prevents.length) return "fits";
  return prevents.length === 1 && prevents[0].kind === "not_built" ? "apart from this it fits" : "";
}

function misfitText(misfit) {
  return [misfit.reason, misfit.remedy ? element("span", { class: "remedy" }, misfit.remedy) : null];
}

function fixedBytes(bill) {
  return bill.items.reduce((sum, item) => sum + item.bytes, 0);
}

/** The budget as a bar: the items in the order of the table, then what is left for KV. */
function budgetBar(bill) {
  const fixed = fixedBytes(bill);
  const left = bill.budget_bytes - fixed;
  const part = (bytes, kind = null) => {
    const made = element("span", { class: kind });
    made.style.flexGrow = Math.max(0, bytes / bill.budget_bytes);
    return made;
  };
  const parts = [...bill.items.map((item) => part(item.bytes)), part(left, "kv-left")];
  const shares = [
    element("span", { class: "soft" }, `${formatBytes(fixed)} fixed`),
    element("span", { class: "kv-left" }, `${formatBytes(left)} for KV`),
  ];
  return element(
    "div",
    {},
    element("div", { class: "budget", "aria-hidden": "true" }, ...parts),
    element("p", { class: "shares" }, ...shares),
  );
}

function memoryTable(bill) {
  const left = bill.budget_bytes - fixedBytes(bill);
  const line = (name, size, formula, kind = null) =>
    element(
      "tr",
      { role: "row", class: kind },
      element("th", { role: "rowheader", scope: "row" }, name),
      cell({ class: "size" }, size),
      cell({ class: "because" }, formula),
    );
  const tokens = Math.floor(Math.max(0, left) / bill.kv_bytes_per_token);
  const perToken = `${bill.kv_bytes_per_token.toLocaleString("en")} B`;
  const rows = bill.items.map((item) => line(item.name, formatBytes(item.bytes), item.formula));
  rows.push(
    line("left for KV", formatBytes(left), "the budget less all of the above", "left"),
    line("KV per token", perToken, bill.kv_formula),
    line("tokens that fit", tokens.toLocaleString("en"), "left for KV / KV per token"),
  );
  return table("memory", ["Item", "Size", "How it was found"], rows);
}
