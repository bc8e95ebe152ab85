// Shows a model's text: paragraphs, headings, fenced code, inline code, bold. Used by the chat.

import { element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}#{1,6}\s+(.*)$/;
const INLINE = /(?<ticks>`+)(?<code>.+?)\k<ticks>(?!`)|\*\*(?<bold>\S(?:.*?\S)?)\*\*/gs;

/** Makes `container` show `text`, keeping the nodes of blocks that did not change: a stream only touches the last. */
export function showText(container, text) {
  const blocks = splitBlocks(text);
  blocks.forEach((block, index) => {
    const shown = container.children[index];
    const source = JSON.stringify(block);
    if (shown?.source === source) return;
    const made = makeBlock(block);
    made.source = source;
    if (shown) shown.replaceWith(made);
    else container.append(made);
  });
  while (container.children.length > blocks.length) container.lastElementChild.remove();
}

function splitBlocks(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const endParagraph = () => {
    if (lines.length) blocks.push({ kind: "paragraph", text: lines.join("\n") });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line);
    if (fence) {
      const closes = mark && mark[1][0] === fence.mark[0] && mark[1].length >= fence.mark.length && !mark[2];
      if (closes) fence = null;
      else fence.block.text += (fence.block.text === "" ? "" : "\n") + line;
    } else if (mark) {
      endParagraph();
      fence = { mark: mark[1], block: { kind: "code", language: mark[2].trim(), text: "" } };
      blocks.push(fence.block);
    } else if (HEADING.test(line)) {
      endParagraph();
      blocks.push({ kind: "heading", text: HEADING.exec(line)[1] });
    } else if (line.trim() === "") {
      endParagraph();
    } else {
      lines.push(line);
    }
  }
  endParagraph();
  return blocks;
}

function makeBlock(block) {
  if (block.kind === "code") {
    const label = block.language ? `Code, ${block.language}` : "Code";
    return element("pre", { tabindex: "0", "aria-label": label }, element("code", {}, block.text));
  }
  return element("p", block.kind === "heading" ? { class: "heading" } : {}, ...inline(block.text));
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, match.index));
    const { code, bold } = match.groups;
    nodes.push(code !== undefined ? element("code", {}, code) : element("strong", {}, ...inline(bold)));
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}
