// Builds elements and formats figures. Text only ever becomes text nodes: nothing here parses HTML.

export const $ = (id) => document.getElementById(id);

/** `element("p", { class: "soft" }, "text", child)`; attributes that are null are left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Sets text only where it differs, so that live regions speak of changes alone. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Bytes as `95.6 GiB`, or `12.5 MiB` below one GiB. */
export function formatBytes(bytes) {
  return Math.abs(bytes) >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

/** What was measured, as `84 ms`, `2.31 s`, `45 s` or `3 min 20 s`. */
export function formatSeconds(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  return seconds < 10 ? `${seconds.toFixed(2)} s` : formatAbout(seconds);
}

/** What is only known roughly, as `1 s`, `45 s` or `3 min 20 s`. */
export function formatAbout(seconds) {
  const whole = Math.max(1, Math.round(seconds));
  return whole < 100 ? `${whole} s` : `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

export function formatRate(rate) {
  return rate < 100 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
}
