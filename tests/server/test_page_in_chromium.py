"""The page in a real browser: what a user sees, presses and is told; nothing refused, nothing thrown.

Needs Chromium (Debian: `apt-get install chromium`). Skips where there is none, except in CI.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pellucid.selection.plan import Decision, ExecutionPlan
from tests.server.chromium import Chromium, Page, chromium, find_chromium
from tests.server.page_scripts import ANSWER, MARKUP, SCRIPTS, answer, real_plan
from tests.server.running import RunningServer, wait_until
from tests.server.scripted_app import READY, ScriptedApp, serve

ENTER = ("Enter", 13)


@pytest.fixture(scope="module")
def running_browser() -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        assert not os.environ.get("CI"), "CI must install Chromium: apt-get install chromium"
        pytest.skip("no Chromium here: apt-get install chromium")
    with chromium(program) as browser:
        yield browser


@pytest.fixture
def browser(running_browser: Chromium) -> Iterator[Chromium]:
    yield running_browser
    running_browser.close_pages()


@pytest.fixture(scope="module")
def plan() -> ExecutionPlan:
    return real_plan()


@pytest.fixture(scope="module")
def running_server(plan: ExecutionPlan) -> Iterator[ScriptedApp]:
    """Answers by the last message: the name of a script, or anything for an ordinary answer."""

    def script(body: dict[str, Any]) -> Any:
        return SCRIPTS.get(body["messages"][-1]["content"], answer)(body)

    app = ScriptedApp({"plan": plan.to_json(), "notes": ["rope scaling: yarn"]}, script)
    with serve(app):
        yield app


@pytest.fixture
def server(running_server: ScriptedApp) -> ScriptedApp:
    running_server.reset()
    return running_server


@pytest.fixture
def page(server: ScriptedApp, browser: Chromium) -> Page:
    return ready(browser.open(server.url))


def ready(page: Page) -> Page:
    page.wait_text("#state", "ready")
    page.wait("document.querySelector('#plan-body table')")
    return page


def send(page: Page, text: str) -> None:
    page.type("#message", text)
    page.press(*ENTER)


def ended(page: Page) -> None:
    page.wait("document.querySelector('.answer') && !document.querySelector('#send').hidden")


def test_the_page_loads_from_its_own_server_without_an_error(server: ScriptedApp, page: Page) -> None:
    assert page.errors() == []
    assert {url for url in page.requested_urls() if not url.startswith(server.url)} <= {"about:blank"}
    assert page.text("#model") == "tiny"
    assert page.text("#base-url") == server.url + "v1"


def test_an_answer_streams_with_its_reasoning_apart_and_its_own_figures(server: ScriptedApp, page: Page) -> None:
    send(page, "hello")
    page.wait("document.querySelector('.reasoning').open")
    page.wait_text(".answer", "One two")
    ended(page)
    assert page.text(".question") == "hello"
    assert not page.value("document.querySelector('.reasoning').open")
    assert page.text(".reasoning summary").startswith("Reasoned for ")
    assert page.value("document.querySelector('.reasoning .text').textContent") == "Let me think."
    figures = page.text(".figures")
    for words in ("first token ", " tokens/s", "4321 tokens", "prompt 1234, 1024 cached"):
        assert words in figures
    assert "about" not in figures
    body = server.bodies[0]
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert page.errors() == []


def test_text_from_the_model_stays_text(page: Page) -> None:
    send(page, "hello")
    ended(page)
    assert MARKUP in page.text(".answer > .text")
    assert page.value("document.querySelectorAll('#log :is(img, b)').length") == 0
    assert page.text(".answer strong") == "two"
    assert page.text(".answer p code") == "three"
    assert page.text(".answer pre") == "for x in y:\n    pass"
    assert page.text(".answer > .text > :last-child") == "last"
    assert page.errors() == []
    # And nothing could put it in as markup: the browser refuses.
    refused = "(() => { try { document.body.innerHTML = '<b>x</b>' } catch (e) { return e.name } })()"
    assert page.value(refused) == "TypeError"


def test_the_next_turn_carries_the_conversation_and_a_new_one_does_not(server: ScriptedApp, page: Page) -> None:
    page.click("#settings summary")
    page.type("#system", "be quick")
    page.value("document.querySelector('#temperature').value = '0'")
    page.type("#max-tokens", "64")
    for text in ("one", "two"):
        send(page, text)
        ended(page)
    system = {"role": "system", "content": "be quick"}
    assistant = {"role": "assistant", "content": ANSWER}
    turns = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    assert server.bodies[1]["messages"] == [system, turns[0], assistant, turns[1]]
    assert (server.bodies[1]["temperature"], server.bodies[1]["max_tokens"]) == (0, 64)
    page.click("#reset")
    assert page.value("document.querySelectorAll('.answer').length") == 0
    send(page, "three")
    ended(page)
    assert server.bodies[2]["messages"] == [system, turns[2]]


def test_a_setting_out_of_range_is_shown_and_nothing_is_sent(server: ScriptedApp, page: Page) -> None:
    page.click("#settings summary")
    page.type("#temperature", "9")
    page.click("#settings summary")
    send(page, "hello")
    page.wait("document.querySelector('#settings').open && document.activeElement.id === 'temperature'")
    assert server.bodies == []
    assert page.errors() == []


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_closes_the_connection_and_keeps_what_came(how: str, server: ScriptedApp, page: Page) -> None:
    send(page, "forever")
    page.wait_text(".answer", "word3")
    assert "about" in page.text(".figures")
    if how == "button":
        page.click("#stop")
    else:
        page.press("Escape", 27)
    ended(page)
    assert server.hung_up.wait(5)
    assert "stopped" in page.text(".figures")
    send(page, "next")
    wait_until(lambda: len(server.bodies) == 2)
    assert "word3" in server.bodies[1]["messages"][1]["content"]
    assert page.errors() == []


def test_a_refused_turn_is_told_and_given_back(server: ScriptedApp, page: Page) -> None:
    send(page, "too long")
    page.wait_text(".error", "The prompt is too long.")
    assert page.value("document.querySelector('#message').value") == "too long"
    page.value("document.querySelector('#message').value = ''")
    send(page, "hello")
    wait_until(lambda: len(server.bodies) == 2)
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(("script", "words"), [("broken", "The engine died."), ("cut", "cut off")])
def test_an_answer_that_breaks_off_is_never_shown_as_whole(script: str, words: str, page: Page) -> None:
    send(page, script)
    page.wait_text(".error", words)
    assert page.text(".answer > .text") == "partial"
    assert "not completed" in page.text(".figures")


def test_a_server_that_is_gone_is_told(server: ScriptedApp, page: Page) -> None:
    page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    send(page, "hello")
    page.wait_text(".error", "cannot be reached")
    page.wait_text("#state", "not reachable")


def test_an_answer_is_the_same_however_its_bytes_are_cut(page: Page) -> None:
    send(page, "split")
    ended(page)
    assert page.text(".answer > .text") == "né 水 🙂"


def test_tool_calls_are_shown_as_text(page: Page) -> None:
    send(page, "tools")
    ended(page)
    assert page.text(".calls pre") == 'weather({"city": "Oslo"})'


def test_shift_enter_makes_a_new_line(page: Page, server: ScriptedApp) -> None:
    page.type("#message", "a")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, modifiers=8, text="\r")
    page.type("#message", "b")
    assert page.value("document.querySelector('#message').value") == "a\nb"
    assert server.bodies == []


def test_the_focus_follows_the_button_that_takes_the_others_place(page: Page) -> None:
    page.type("#message", "forever")
    page.value("document.querySelector('#send').focus()")
    page.press(*ENTER)
    page.wait("document.activeElement.id === 'stop'")
    page.wait_text(".answer", "word1")
    page.press(*ENTER)
    page.wait("document.activeElement.id === 'send'")


def test_it_talks_to_the_real_server(demo_server: RunningServer, browser: Chromium) -> None:
    page = ready(browser.open(demo_server.base_url))
    assert page.text("#model") == "demo"
    page.value("document.querySelector('#temperature').value = 0; document.querySelector('#max-tokens').value = 8")
    send(page, "What is gravity?")
    ended(page)
    expected = demo_server.chat("What is gravity?").json["choices"][0]["message"]["content"]
    assert page.text(".answer > .text") == expected.strip()
    figures = page.text(".figures")
    assert "8 tokens" in figures
    assert "ended at the token limit" in figures
    assert page.text("#kv").endswith("%")
    assert "cpu_native" in page.text("#plan-body")
    send(page, "Tell me a long story.")
    page.press("Escape", 27)
    ended(page)
    wait_until(lambda: demo_server.metric("pellucid:num_requests_running") == 0)
    assert page.errors() == []


def grouped(plan: ExecutionPlan) -> Iterator[list[Decision]]:
    for _, run in itertools.groupby(plan.decisions, lambda d: (d.op, d.value, d.how)):
        yield list(run)


def test_the_plan_is_a_table_of_runs_of_equal_decisions(plan: ExecutionPlan, page: Page) -> None:
    rows = page.value(
        "[...document.querySelectorAll('[aria-labelledby=decisions] > tbody > tr:not(.rejected)')].map(row =>"
        " [...row.children].slice(0, 3).map(cell => cell.innerText.replace('\\n', ' ')))"
    )
    expected = []
    for run in grouped(plan):
        first, last = run[0].bucket, run[-1].bucket
        tokens = "" if first is None else f" {first}–{last} tokens" if first != last else f" {first} tokens"
        value = {True: "on", False: "off"}.get(run[0].value) if isinstance(run[0].value, bool) else str(run[0].value)
        expected.append([run[0].op + tokens.replace(" 1 tokens", " 1 token"), value, run[0].how])
    assert rows == expected
    assert {row[2] for row in rows} >= {"default", "measured", "forced by traits"}
    shown = page.text("#plan-body")
    for decision in plan.decisions:
        assert all(reason in shown for reason in decision.because[: 1 if decision.measured else None])
        for one in decision.measured:
            assert f"{one.seconds * 1e6:.1f} ± 0.5 µs" in shown
    for item in plan.memory.items:
        assert item.name in shown
        assert item.formula in shown
    assert "note: rope scaling: yarn" in shown


def test_what_was_not_taken_unfolds_with_every_reason_and_remedy(plan: ExecutionPlan, page: Page) -> None:
    decision = next(d for d in plan.decisions if any(m.remedy for r in d.rejected for m in r.misfits))
    button = "document.querySelector('.because button')"
    assert page.value(f"{button}.getAttribute('aria-expanded')") == "false"
    page.value(f"{button}.focus()")
    page.press(*ENTER)
    assert page.value(f"{button}.getAttribute('aria-expanded')") == "true"
    shown = page.text(".rejected")
    for rejection in decision.rejected:
        assert rejection.candidate in shown
        for misfit in rejection.misfits:
            assert misfit.reason in shown
            assert misfit.remedy in shown
    page.press(*ENTER)
    assert page.text(".rejected") == ""


def test_the_strip_shows_the_load_whatever_the_prefix(server: ScriptedApp, browser: Chromium) -> None:
    server.metrics = {
        "num_requests_running": 3,
        "num_requests_waiting": 1200,
        "kv_cache_usage_perc": 0.413,
        "generation_tokens_total": 100,
    }
    page = ready(browser.open(server.url))
    assert [page.text("#" + name) for name in ("running", "waiting", "kv")] == ["3", "1,200", "41 %"]
    assert page.value("document.querySelector('#kv-bar').value") == 0.413
    page.wait("document.querySelector('#throughput').innerText === '0.0'")
    server.metrics["generation_tokens_total"] += 3000
    server.metrics["num_requests_waiting"] = 0
    server.metrics_prefix = "vllm"
    page.wait("Number(document.querySelector('#throughput').innerText.replace(',', '')) > 100")
    assert page.text("#waiting") == "0"


def test_loading_is_shown_with_its_progress_and_the_plan_follows(server: ScriptedApp, browser: Chromium) -> None:
    progress = {"phase": "reading weights", "bytes_done": 3 * 2**30, "bytes_total": 12 * 2**30, "eta_s": 41.2}
    server.health = {**READY, "status": "loading", **progress}
    page = browser.open(server.url)
    page.wait_text("#state", "loading")
    assert page.text("#notice-text") == "reading weights · 3.0 GiB of 12.0 GiB · 41 s left"
    assert page.value("document.querySelector('#loading-bar').position") == 0.25
    assert "/plan" not in server.paths
    server.health = dict(READY)
    ready(page)
    assert not page.text("#notice")
    server.health = {**READY, "status": "dead", "message": "the engine process was killed"}
    page.wait_text("#notice", "the engine process was killed")
    assert page.text("#state") == "stopped"


def test_a_key_is_asked_for_only_when_the_server_wants_one_and_stays_in_the_tab(
    server: ScriptedApp, browser: Chromium
) -> None:
    page = ready(browser.open(server.url))
    assert page.text("#key-form") == ""
    server.api_key = "sk-1"
    page = browser.open(server.url)
    page.wait_text("#key-form", "API key")
    for key in ("wrong", "sk-1"):
        page.type("#key", key)
        page.press(*ENTER)
        if key == "wrong":
            page.wait_text("#key-form", "does not accept")
    page.wait("document.querySelector('#plan-body table')")
    assert page.text("#key-form") == ""
    send(page, "hello")
    ended(page)
    assert page.text(".question") == "hello"
    assert page.value("[localStorage.length, document.cookie, location.href]") == [0, "", server.url]


def test_a_hidden_tab_does_not_poll(server: ScriptedApp, page: Page) -> None:
    def hide(hidden: bool) -> None:
        page.value(
            f"Object.defineProperty(document, 'hidden', {{ value: {json.dumps(hidden)}, configurable: true }});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )

    hide(True)
    time.sleep(0.3)
    before = len(server.paths)
    time.sleep(1.7)
    assert len(server.paths) == before
    hide(False)
    deadline = time.monotonic() + 5
    while len(server.paths) == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_window(width: int, server: ScriptedApp, browser: Chromium) -> None:
    page = ready(browser.open(server.url, width, 740, dark=True))
    send(page, "x" * 500)
    ended(page)
    page.value("document.querySelectorAll('.because button').forEach((button) => button.click())")
    page.value("document.querySelector('#settings').open = true")
    for view in ("plan", "chat"):
        page.value(f"location.hash = '{view}'")
        page.wait(f"document.querySelector('#{view}').clientWidth > 0")
        for box in ("html", "#log", "#plan", "header"):
            wide = page.value(f"(e => e.scrollWidth - e.clientWidth)(document.querySelector('{box}'))")
            assert wide <= 0, (view, box)
        assert page.value("document.documentElement.scrollHeight <= innerHeight")


def test_every_control_has_a_name(page: Page) -> None:
    page.value("document.querySelector('#settings').open = true; document.querySelector('#key-form').hidden = false")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = [n for n in nodes if n["role"]["value"] in ("button", "textbox", "spinbutton", "link", "meter", "log")]
    assert len(controls) > 10
    assert [n["role"]["value"] for n in controls if not n["name"]["value"]] == []
