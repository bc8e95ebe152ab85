// The conversation: sends turns, shows answers as they stream with their own figures. Started by app.js.

import { streamChat } from "./api.js";
import { $, element, formatRate, formatSeconds, setText } from "./dom.js";
import { showText } from "./format.js";

/** `modelName` is a function: the name is known once the server has answered. */
export function startChat(modelName) {
  const log = $("log");
  const opening = $("opening");
  const message = $("message");
  let turns = [];
  let running = null;
  let following = true;

  // The end stays in sight unless the reader has scrolled up, also when the log itself becomes smaller.
  const follow = () => {
    if (following) log.scrollTop = log.scrollHeight;
  };
  log.addEventListener("scroll", () => {
    following = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  });
  new ResizeObserver(follow).observe(log);

  async function send() {
    const text = message.value.trim();
    if (!text || running) return;
    const settings = readSettings();
    if (!settings) return;
    opening.remove();
    const question = element("article", { class: "question", "aria-label": "You" }, element("p", {}, text));
    const answer = new AnswerView();
    log.append(question, answer.article);
    following = true;
    message.value = "";
    const conversation = turns;
    conversation.push({ role: "user", content: text });
    await receive(conversation, answer, settings);
    if (answer.content || answer.complete) {
      conversation.push({ role: "assistant", content: answer.content });
    } else {
      // Nothing came: the turn is taken back, its text ready to be sent again.
      conversation.pop();
      if (conversation === turns && !message.value) message.value = text;
    }
    if (conversation === turns) setText($("announcer"), answer.summary());
  }

  async function receive(conversation, answer, { system, parameters }) {
    running = new AbortController();
    const { signal } = running;
    setBusy(true);
    answer.show();
    follow();
    try {
      const messages = system ? [{ role: "system", content: system }, ...conversation] : conversation;
      const body = { model: modelName(), messages, ...parameters };
      for await (const chunk of streamChat(body, signal)) {
        answer.add(chunk);
        answer.showSoon(follow);
      }
      answer.end();
    } catch (error) {
      if (signal.aborted) answer.stop();
      else answer.fail(error.message);
    }
    answer.show();
    follow();
    running = null;
    setBusy(false);
  }

  /** One button takes the other's place, and the focus with it. */
  function setBusy(busy) {
    log.setAttribute("aria-busy", String(busy));
    const [shown, gone] = busy ? [$("stop"), $("send")] : [$("send"), $("stop")];
    const focused = document.activeElement === gone;
    shown.hidden = false;
    gone.hidden = true;
    if (focused) shown.focus();
  }

  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("reset").addEventListener("click", () => {
    running?.abort();
    turns = [];
    log.replaceChildren(opening);
    message.focus();
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
}

/** The system prompt and the parameters that were typed; null when one is out of range, which is then shown. */
function readSettings() {
  if (!$("composer").checkValidity()) {
    $("settings").open = true;
    $("composer").reportValidity();
    return null;
  }
  const parameters = {};
  if ($("temperature").value) parameters.temperature = Number($("temperature").value);
  if ($("max-tokens").value) parameters.max_tokens = Number($("max-tokens").value);
  return { system: $("system").value.trim(), parameters };
}

const ENDINGS = {
  length: "ended at the token limit",
  abort: "ended by the server",
  stopped: "stopped",
  failed: "not completed",
};

class AnswerView {
  constructor() {
    this.content = "";
    this.complete = this.done = this.collapsed = false;
    this.reasoning = "";
    this.calls = [];
    this.usage = null;
    this.chunks = 0;
    this.ending = null;
    this.sent = performance.now();
    this.first = this.last = this.answered = null;
    this.frame = 0;
    this.summaryLine = element("summary", {}, "Reasoning");
    this.reasoningText = element("div", { class: "text" });
    this.reasoningBlock = element("details", { class: "reasoning", hidden: "", open: "" });
    this.reasoningBlock.append(this.summaryLine, this.reasoningText);
    this.text = element("div", { class: "text" });
    this.tools = element("div", { class: "calls" });
    this.figures = element("p", { class: "figures" }, "waiting for the first token");
    this.article = element("article", { class: "answer", "aria-label": "Answer" });
    this.article.append(this.reasoningBlock, this.text, this.tools, this.figures);
  }

  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (choice?.finish_reason) this.ending = choice.finish_reason;
    const delta = choice?.delta ?? {};
    const reasoning = delta.reasoning_content || delta.reasoning || "";
    const calls = delta.tool_calls ?? [];
    if (!reasoning && !delta.content && !calls.length) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.chunks += 1;
    this.reasoning += reasoning;
    this.content += delta.content || "";
    if (!reasoning) this.answered ??= this.last;
    for (const call of calls) {
      const known = (this.calls[call.index ?? 0] ??= { name: "", arguments: "" });
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
  }

  end() {
    this.complete = this.done = true;
  }

  stop() {
    this.done = true;
    this.ending = "stopped";
  }

  fail(text) {
    this.done = true;
    this.ending = "failed";
    this.article.append(element("p", { class: "error", role: "alert" }, text));
  }

  showSoon(then) {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.show();
      then();
    });
  }

  show() {
    if (this.reasoning) {
      this.reasoningBlock.hidden = false;
      showText(this.reasoningText, this.reasoning);
      if (this.answered && !this.collapsed) {
        this.collapsed = true;
        this.reasoningBlock.open = false;
        setText(this.summaryLine, `Reasoned for ${formatSeconds((this.answered - this.first) / 1000)}`);
      }
    }
    showText(this.text, this.content);
    const calls = this.calls.filter(Boolean).map((call) => `${call.name}(${call.arguments})`);
    this.tools.replaceChildren(...calls.map((call) => element("pre", {}, call)));
    setText(this.figures, this.figuresText());
  }

  figuresText() {
    if (this.first === null) {
      if (this.ending === "failed") return "";
      return this.done ? (ENDINGS[this.ending] ?? "an empty answer") : "waiting for the first token";
    }
    const exact = this.usage?.completion_tokens;
    const tokens = exact ?? this.chunks;
    const about = exact === undefined ? "about " : "";
    const parts = [`first token ${formatSeconds((this.first - this.sent) / 1000)}`];
    if (tokens > 1 && this.last > this.first) {
      parts.push(`${about}${formatRate(((tokens - 1) * 1000) / (this.last - this.first))} tokens/s`);
    }
    parts.push(`${about}${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    const prompt = this.usage?.prompt_tokens;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (prompt) parts.push(`prompt ${prompt}${cached ? `, ${cached} cached` : ""}`);
    if (this.done && ENDINGS[this.ending]) parts.push(ENDINGS[this.ending]);
    return parts.join(" · ");
  }

  /** For screen readers, once it has ended; a failure speaks for itself. */
  summary() {
    return this.ending === "failed" ? "" : `Answer: ${this.figuresText()}`;
  }
}
