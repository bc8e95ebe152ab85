"""The HTML report: one file, nothing fetched, nothing of a traced tree taken for markup."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pellucid.tracer.excerpt import Excerpts, colour
from pellucid.tracer.html import to_html
from pellucid.tracer.record import Decision, LogLine, Trace
from tests.tracer import hand_made
from tests.tracer.hand_made import by_list, guard, site, term

VOID = {"meta", "link", "br", "img"}
SOURCE = '''class ServerArgs:
    def choose(self):
        """Text
        over lines."""
        if is_sm100_supported():  # a < b
            pass
        else:
            self.attention_backend = "triton" if self.x < 3 else 'y'
'''


class Nesting(HTMLParser):
    """Fails where tags do not close in order; keeps the text and what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "onclick", "onload")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Nesting:
    parser = Nesting()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def small_trace() -> Trace:
    choice = site(8, 'self.attention_backend = "triton"', "ServerArgs.choose", "pkg/args.py")
    where = site(5, "if is_sm100_supported():", "ServerArgs.choose", "pkg/args.py")
    condition = guard(5, "if is_sm100_supported():", False, term("is_sm100_supported()", False, "hardware"))
    found = Decision(
        "attention_backend",
        "triton",
        "forced",
        "configuration",
        (
            type(by_list(in_list=True, on_sm100=True))(
                "triton", choice, (type(condition)(where, False, condition.terms),)
            ),
        ),
        ("hardware",),
    )
    return hand_made.sglang(decisions=(found,))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "args.py").write_text(SOURCE)
    return tmp_path


def test_the_page_is_well_formed_and_fetches_nothing() -> None:
    page = to_html(hand_made.sglang())
    parser = read(page)
    assert parser.fetched == []
    assert "://" not in page
    assert "<script" not in page
    assert "url(" not in page


def test_every_decision_is_there_with_its_paragraph() -> None:
    trace = hand_made.sglang()
    text = " ".join(read(to_html(trace)).text)
    assert {one.field for one in trace.decisions} == {one.field for one in trace.decisions if one.field in text}
    assert "was not reached" in text
    assert "srt/server_args.py:1283" in text


def test_the_excerpt_marks_the_deciding_line_and_shows_the_conditions_value(tree: Path) -> None:
    page = to_html(small_trace(), tree)
    read(page)
    hit = re.search(r'<tr class="hit"><th>(\d+)</th>', page)
    failed = re.search(r'<tr class="failed"><th>(\d+)</th>.*?<span class="seen">(.*?)</span>', page)
    assert hit is not None and hit[1] == "8"
    assert failed is not None and failed.groups() == ("5", "false")


def test_without_the_source_the_lines_are_quoted() -> None:
    page = to_html(small_trace())
    assert '<div class="source">' not in page
    assert "self.attention_backend = &quot;triton&quot;" in page


def test_markup_in_names_values_logs_and_source_stays_text(tmp_path: Path) -> None:
    evil = '</style></pre><script>alert("x")</script><img src=x onerror=y>'
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "args.py").write_text(
        f"# {evil}\n" * 4 + f'if is_sm100_supported():\n    x = """{evil}\n{evil}"""\n'
    )
    trace = small_trace()
    page = to_html(
        Trace(
            **{
                **{name: getattr(trace, name) for name in ("engine", "version", "gpu", "flags", "decisions")},
                "model": evil,
                "architecture": evil,
                "log": (LogLine("INFO", evil, site(1, evil)),),
                "notes": (evil,),
                "pins": {evil: evil},
                "stubs": (evil,),
                "refusal": hand_made.refusal(),
            }
        ),
        tmp_path,
    )
    assert read(page).fetched == []
    assert "<script" not in page
    assert "<img" not in page


def test_many_lines_that_were_not_reached_fold_away() -> None:
    found = small_trace().decisions[0]
    roads = tuple(
        replace(found.history[0], value=str(line), site=site(line, f"x = {line}", file="pkg/args.py"))
        for line in range(10, 30)
    )
    page = to_html(hand_made.sglang(decisions=(replace(found, could=roads),)))
    read(page)
    assert "<summary>14 more</summary>" in page
    assert all(f"x = {line}" in page for line in range(10, 30))


def test_a_traces_path_never_leaves_the_tree(tree: Path) -> None:
    (tree / "secret.py").write_text("password = 1\n")
    inner = Excerpts(tree / "pkg")
    assert list(inner.excerpt("args.py", [1]))
    assert list(inner.excerpt("../secret.py", [1])) == []
    assert list(inner.excerpt(str(tree / "secret.py"), [1])) == []
    assert list(inner.excerpt("absent.py", [1])) == []


def test_an_excerpt_shows_surroundings_and_gaps() -> None:
    lines = [line.number for line in _excerpt_of(20, [4, 15])]
    assert lines == [2, 3, 4, 5, 6, None, 13, 14, 15, 16, 17]


def _excerpt_of(count: int, lines: list[int]) -> list:  # type: ignore[type-arg]
    class Fixed(Excerpts):
        def _read(self, file: str) -> tuple[str, ...]:
            return tuple(f"line {number}" for number in range(1, count + 1))

    return list(Fixed(None).excerpt("any", lines))


def test_colouring_changes_no_character() -> None:
    for source in (SOURCE, "def f(:\n  broken <\n", "x = f'{a!r}b' # c\n\ty\n", "\x0c\nif 1: pass\n"):
        plain = [re.sub(r"</?i[^>]*>", "", line) for line in colour(source)]
        unescaped = [one.replace("&lt;", "<").replace("&#x27;", "'").replace("&quot;", '"') for one in plain]
        assert "\n".join(unescaped) == source
    assert '<i class="k">if</i>' in colour(SOURCE)[4]
    assert '<i class="c"># a &lt; b</i>' in colour(SOURCE)[4]
    assert colour(SOURCE)[3].endswith("over lines.&quot;&quot;&quot;</i>")
