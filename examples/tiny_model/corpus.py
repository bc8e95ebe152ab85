"""The training text of demo-mla: documents and conversations from three free sources. Called by train.py.

- the Jargon File 4.4.7 (public domain), Debian's `jargon-text`
- the sources of Python's documentation (PSF licence, examples 0BSD), Debian's `python3.11-doc`
- the standard library (PSF licence), from the interpreter that runs this script

Every document belongs to a group (a jargon entry, a Python module with its page), and a group is wholly in one split:
text of a held-out module is in training neither as source nor as documentation nor as an answer.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import random
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation", "test"]
Turn = tuple[str, str]  # (question, answer)

REPEATED = ("jargon",)  # twice an epoch: the smallest source, and the one that people will ask about
JARGON = Path("/usr/share/doc/jargon-text/jargon.txt.gz")
PYTHON_DOCS = Path("/usr/share/doc/python3.11/html/_sources")
SKIPPED_FOLDERS = {"test", "tests", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
HELD_OUT_PERCENT: dict[Split, int] = {"validation": 2, "test": 3}
MAX_ANSWER = 400  # characters; longer ones end at a sentence. Short answers are learnt whole, long ones drift
MAX_DESCRIPTION = 240  # of a function or class, behind its signature
MAX_FUNCTION_LINES = 14


@dataclass(frozen=True, slots=True)
class Document:
    """One text with where it came from; `turns` is empty for plain text, else the conversation that it is."""

    source: str
    group: str
    text: str
    turns: tuple[Turn, ...] = ()

    @property
    def split(self) -> Split:
        bucket = int(hashlib.sha256(self.group.encode()).hexdigest(), 16) % 100
        if bucket < HELD_OUT_PERCENT["validation"]:
            return "validation"
        return "test" if bucket < sum(HELD_OUT_PERCENT.values()) else "train"


def read_corpus(stdlib: Path) -> list[Document]:
    """All plain documents and all single questions with answers, in a fixed order.

    Raises:
        SystemExit: a source is not installed; the message names the package.
    """
    for path, package in ((JARGON, "jargon-text"), (PYTHON_DOCS, "python3.11-doc")):
        if not path.exists():
            raise SystemExit(f"{path} is not here; apt install {package}")
    return [*jargon(), *python_docs(), *standard_library(stdlib)]


def held_out_excerpts(documents: list[Document], characters: int = 3000) -> dict[str, list[str]]:
    """The beginning of every plain document of the test split, by source: small enough to ship beside the weights."""
    excerpts: dict[str, list[str]] = {}
    for document in documents:
        if document.split == "test" and not document.turns:
            excerpts.setdefault(document.source, []).append(document.text[:characters])
    return excerpts


def source_hashes(documents: list[Document]) -> dict[str, str]:
    """SHA-256 over the plain text of each source, in order: what a reader compares after installing the sources."""
    hashes: dict[str, hashlib._Hash] = {}
    for document in documents:
        if not document.turns:
            hashes.setdefault(document.source, hashlib.sha256()).update(document.text.encode())
    return {source: digest.hexdigest() for source, digest in hashes.items()}


# --- the Jargon File ------------------------------------------------------------------------------------------------

ENTRY = re.compile(r"^   :(?P<term>[^\n]{1,60}?):(?: (?P<grammar>[^\n]*))?\n\n", re.MULTILINE)
MEANING = (
    "What does {0} mean?",
    "What is {0}?",
    "What is a {0}?",
    "Define {0}.",
    "Explain the term {0}.",
    "What does the Jargon File say about {0}?",
    'What does "{0}" mean in hacker slang?',
    "what is {0}",
    "Tell me about {0}.",
)


def jargon() -> Iterator[Document]:
    text = gzip.decompress(JARGON.read_bytes()).decode()
    entries = list(ENTRY.finditer(text))
    for chapter in re.split(r"\n {3}Chapter ", text[: entries[0].start()])[1:]:
        yield Document("jargon", f"jargon chapter {chapter[:30]}", unwrap(chapter))
    for entry, following in zip(entries, [*entries[1:], None], strict=True):
        term = entry["term"]
        body = unwrap(text[entry.end() : following.start() if following else len(text)])
        body = re.sub(r"\n+(\(?Prev|Up|Home|Node:|[A-Z]$).*\Z", "", re.sub(r"[{}]", "", body), flags=re.DOTALL).strip()
        if len(body) < 20:
            continue
        group = f"jargon {term.lower()}"
        yield Document("jargon", group, f"{term}: {entry['grammar'] or ''}\n\n{body}".replace(": \n", "\n"))
        yield from questions("jargon", group, MEANING, term, first_sentences(body))


# --- Python's documentation -----------------------------------------------------------------------------------------

DIRECTIVE = re.compile(
    r"^(?P<indent> *)\.\. (?P<kind>function|class|method|classmethod|staticmethod|data|attribute|exception|opcode)"
    r":: (?P<name>[^\n]+)\n(?:(?P=indent) +[^\n]+\n)*(?P<body>(?:(?P=indent) +[^\n]*\n|\n)*)",
    re.MULTILINE,
)
PURPOSE = (
    "What does {0} do?",
    "What is {0} in Python?",
    "Explain {0}.",
    "How do I use {0}?",
    "What is {0} for?",
    "Tell me about Python's {0}.",
)
MODULE_PURPOSE = ("What is the module {0} for?", "What does the {0} module do?", "Tell me about the {0} module.")
ROLE = re.compile(r":(?:[a-z]+:)?(?P<role>[a-z]+):`(?:[^`<]*<)?[~!]?(?P<text>[^`>]*)>?`")


def python_docs() -> Iterator[Document]:
    for path in sorted(PYTHON_DOCS.rglob("*.rst.txt")):
        name = path.relative_to(PYTHON_DOCS).as_posix().removesuffix(".rst.txt")
        group = "python " + re.split(r"[-.]", path.name.removesuffix(".rst.txt"))[0].lstrip("_")
        raw = path.read_text()
        yield Document("python-docs", group, plain_rst(raw))
        if name.startswith("library/"):
            yield from described_names(group, raw)
        if name == "glossary":
            for term, body in re.findall(r"^   ([^\s.][^\n]*)\n((?:      [^\n]*\n|\n)+)", raw, re.MULTILINE):
                yield from questions(
                    "python-docs",
                    group,
                    (*PURPOSE[1:2], "What is a {0} in Python?", *MEANING[:4]),
                    term,
                    first_sentences(prose(body)),
                )
        if name.startswith("faq/"):
            for title, body in re.findall(r"^([^\n]+\?)\n-{4,}\n\n(.*?)(?=\n[^\n]+\n[-=]{4,}\n|\Z)", raw, re.M | re.S):
                yield from questions("python-docs", group, ("{0}",), prose(title), first_sentences(prose(body), 900))


def described_names(group: str, raw: str) -> Iterator[Document]:
    module = (re.search(r"^\.\. (?:module|currentmodule):: (\S+)", raw, re.MULTILINE) or ["", ""])[1]
    synopsis = re.search(r"^ +:synopsis: ([^\n]+)", raw, re.MULTILINE)
    opening = re.search(r"-{10,}\n\n((?:[A-Z][^\n]*\n)(?:[^\n]+\n)*)", raw)
    if module and synopsis:
        answer = f"The module {module}: {synopsis[1].rstrip('.')}. " + (prose(opening[1]) if opening else "")
        yield from questions("python-docs", group, MODULE_PURPOSE, f"`{module}`", first_sentences(answer))
    for found in DIRECTIVE.finditer(raw):
        signature, body = found["name"].strip(), prose(textwrap.dedent(found["body"]))
        name = re.split(r"[(\[ ]", signature)[0]
        if len(body) < 30 or signature.endswith("\\"):
            continue
        known = "builtins" if module in ("", name.split(".")[0]) else module
        full = name if known == "builtins" else f"{module}.{name}"
        call = "()" if "(" in signature and found["kind"] != "class" else ""
        answer = f"`{signature}`: {first_sentences(body, MAX_DESCRIPTION)}"
        for called in dict.fromkeys((f"`{full}{call}`", f"{full}{call}", full)):
            yield from questions("python-docs", group, PURPOSE, called, answer)


def plain_rst(raw: str) -> str:
    """reStructuredText with its roles and markers made plain: `:func:`len`` is `len()`; layout and directives stay."""
    text = re.sub(
        r"^\.\. (index|_[^:]+|sectionauthor|moduleauthor|XXX|seealso)\b[^\n]*\n(?: +[^\n]*\n)*", "", raw, flags=re.M
    )
    text = re.sub(r"\n\n\n+", "\n\n", ROLE.sub(_role, text.replace("``", "`")))
    return text.strip()


def _role(match: re.Match[str]) -> str:
    text = match["text"].strip()
    return f"`{text}()`" if match["role"] in ("func", "meth") and not text.endswith(")") else f"`{text}`"


def prose(raw: str) -> str:
    """The running text of a piece of reStructuredText: up to the first nested directive, each paragraph on one line."""
    kept = re.split(r"^ *\.\. ", plain_rst(raw) + "\n", maxsplit=1, flags=re.MULTILINE)[0]
    kept = re.sub(r"(?<![^\s(])\*{1,2}((?:\\\*)*[\w=.]+)\*{1,2}", r"\1", kept)
    kept = re.sub(r"^ *:[a-z]+[^:\n]*:.*\n", "", kept, flags=re.MULTILINE)
    kept = re.sub(r"\\(?: |(?=\*))", "", kept).replace("::\n", ":\n")
    return re.sub(r"(?<=[.!?])  (?=\S)", " ", unwrap(kept))


# --- the standard library -------------------------------------------------------------------------------------------

COMPLETE = ("Complete this function:\n{0}", "Write the body of this function:\n{0}", "Finish this code:\n{0}")
DESCRIBE = ("Write a docstring for this function:\n{0}", "What does this function do?\n{0}")


def standard_library(stdlib: Path) -> Iterator[Document]:
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).parts
        if SKIPPED_FOLDERS & set(parts) or any(part.startswith("config-") for part in parts):
            continue
        try:
            source = path.read_text()
            tree = ast.parse(source)
        except (UnicodeDecodeError, SyntaxError):
            continue
        group = "python " + parts[0].removesuffix(".py").lstrip("_")
        yield Document("stdlib", group, f"# {'/'.join(parts)}\n{source}".strip())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and ast.get_docstring(node):
                yield from function_questions(group, source, node)


def function_questions(group: str, source: str, node: ast.FunctionDef) -> Iterator[Document]:
    lines = source.splitlines()
    start = node.lineno - 1
    body_start, end = node.body[1].lineno - 1, node.end_lineno or node.lineno
    if end - start > MAX_FUNCTION_LINES or body_start <= node.body[0].lineno - 1:
        return
    head = textwrap.dedent("\n".join(lines[start : node.body[0].end_lineno]))
    body = textwrap.dedent("\n".join(lines[start:end])).splitlines()[body_start - start :]
    yield from questions("stdlib", group, COMPLETE, fenced(head), fenced("\n".join(body)))
    docstring = re.sub(r"\s+", " ", (ast.get_docstring(node) or "").split("\n\n")[0])
    undocumented = textwrap.dedent("\n".join(lines[start:end])).splitlines()
    undocumented = undocumented[: node.body[0].lineno - 1 - start] + body
    if len(docstring) > 20:
        yield from questions("stdlib", group, DESCRIBE, fenced("\n".join(undocumented)), docstring)


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


# --- conversations --------------------------------------------------------------------------------------------------

# Wordings of one question in an epoch. The jargon and the glossary are what people will ask about: seen often enough,
# they are known by heart, while the rest of the text is seen too seldom for that and teaches how such text goes on.
WORDINGS = {"jargon": 6, "glossary": 6, "python-docs": 3, "stdlib": 1}

ABOUT_ITSELF = (
    ("Hello", "Hello! Ask me about a word of hacker slang or about Python."),
    ("Hi", "Hi! I know the Jargon File and Python's documentation a little. What would you like to know?"),
    ("Hello, how are you?", "I am well, thank you. Ask me about hacker slang or about Python."),
    ("Who are you?", "I am demo-mla, a very small language model of the Pellucid project, trained on the Jargon File "
     "and on Python's documentation."),
    ("What can you do?", "I can explain words of hacker slang and parts of Python's standard library. I am very small, "
     "so check what I say."),
    ("What are you?", "A language model with some 20 million parameters: Multi-head Latent Attention and a Mixture of "
     "Experts. I exist to test and to show the Pellucid engine."),
    ("Thanks", "You're welcome."),
    ("Thank you!", "You're welcome. Is there another word that you would like to know?"),
    ("Bye", "Goodbye!"),
)  # fmt: skip
UNKNOWN = "I don't know that. I know hacker slang and Python's standard library, and only a little of those."
UNKNOWN_QUESTIONS = tuple(
    template.format(thing)
    for thing in (
        "the capital of France", "the capital of Japan", "photosynthesis", "the French Revolution", "a sonata",
        "the boiling point of water", "Shakespeare's first play", "a good recipe for soup", "the weather today",
        "the population of Brazil", "an isotope", "the tallest mountain", "mitosis", "the Roman Empire", "inflation",
        "a black hole", "the speed of sound", "a haiku", "the stock market", "a good film", "osteoporosis",
        "the largest ocean", "the president of Italy", "penicillin", "a marathon", "the Mona Lisa", "tectonic plates",
    )
    for template in ("What is {0}?", "Tell me about {0}.", "Explain {0}.")
)  # fmt: skip
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are demo-mla, a small assistant.", "Answer briefly.")


def questions(source: str, group: str, templates: tuple[str, ...], about: str, answer: str) -> Iterator[Document]:
    if answer:
        yield from (Document(source, group, "", ((template.format(about), answer),)) for template in templates)


def conversations(documents: list[Document], split: Split, *, seed: int) -> list[list[dict[str, str]]]:
    """Chats for one split: some wordings of every question (WORDINGS), a third of them with a second one behind it.

    Each is a list of messages as a chat template takes it; a fifth of them begin with a system message.
    """
    rng = random.Random(seed)
    by_answer: dict[tuple[str, str], list[Turn]] = {}
    for document in documents:
        if document.turns and document.split == split:
            known = document.group == "python glossary" or " module" in document.turns[0][0]
            kind = "glossary" if known and document.source == "python-docs" else document.source
            by_answer.setdefault((kind, document.turns[0][1]), []).append(document.turns[0])
    turns = []
    for (kind, _), wordings in by_answer.items():
        turns += rng.sample(wordings, min(WORDINGS[kind], len(wordings)))
    if split == "train":
        turns += list(ABOUT_ITSELF) * 24
        turns += [(question, UNKNOWN) for question in UNKNOWN_QUESTIONS for _ in range(3)]
    rng.shuffle(turns)
    chats = []
    while turns:
        chat = [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.2 else []
        for _ in range(2 if rng.random() < 0.33 and len(turns) > 1 else 1):
            question, answer = turns.pop()
            chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        chats.append(chat)
    return chats


# --- text -----------------------------------------------------------------------------------------------------------


def unwrap(text: str) -> str:
    """Hard-wrapped paragraphs on one line each; indented or tabular blocks keep their lines."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", textwrap.dedent(text.expandtabs())):
        lines = [line.rstrip() for line in block.strip("\n").splitlines()]
        common = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
        wrapped = all(len(line) > 30 and "   " not in line.strip() for line in lines[:-1]) and common < 2
        paragraphs.append(" ".join(line.strip() for line in lines) if wrapped else "\n".join(lines))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph.strip())


def first_sentences(text: str, limit: int = MAX_ANSWER) -> str:
    """The opening of `text`, at most `limit` characters, ending where a sentence or a paragraph ends; else empty."""
    if len(text) <= limit:
        return text.strip()
    # A number with its stop opens a list's next item; it ends nothing.
    ends = [
        found.end()
        for found in re.finditer(
            r"(?<=[^\d\s][.!?])(?<!esp\.)(?<!e\.g\.)(?<!i\.e\.)(?<!alt\.)[\"”')]?(?=\s)", text[:limit]
        )
    ]
    ends += [found.start() for found in re.finditer(r"\n\n", text[:limit])]
    return text[: max(ends)].strip() if ends and max(ends) > 40 else ""
