"""The page's files as served: types, caching, headers that keep everything else out, and nothing from elsewhere."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pellucid.server.page import FOLDER, page_routes
from tests.server.scripted_app import ScriptedApp, refusal, serve

FILES = sorted(FOLDER.iterdir())
PATHS = [route.path for route in page_routes()]
TYPES = {"/": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    app = ScriptedApp({}, lambda _: refusal(500, "not here"))
    with serve(app):
        yield app.url


def ask(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, Message, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers, body


def test_every_file_of_the_page_is_served() -> None:
    assert set(PATHS) == {"/", *(f"/page/{file.name}" for file in FILES if file.name != "index.html")}


@pytest.mark.parametrize("path", PATHS)
def test_a_file_comes_with_its_type_and_what_keeps_it_safe(path: str, server: str) -> None:
    status, headers, body = ask(server, path)
    assert status == 200
    assert body == (FOLDER / (path.rpartition("/")[2] or "index.html")).read_bytes()
    assert headers.get_content_type() == TYPES[path[path.rfind(".") :] if "." in path else path]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Referrer-Policy"] == "no-referrer"
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert not [value for value in policy.values() if "unsafe" in value or "*" in value or "http" in value]


@pytest.mark.parametrize("path", PATHS)
def test_a_file_is_asked_for_again_and_sent_again_only_when_it_changed(path: str, server: str) -> None:
    _, headers, _ = ask(server, path)
    assert headers["Cache-Control"] == "no-cache"
    for tag in (headers["ETag"], "W/" + headers["ETag"], f'"other", {headers["ETag"]}', "*"):
        status, again, body = ask(server, path, If_None_Match=tag)
        assert (status, body, again["ETag"]) == (304, b"", headers["ETag"])
    assert ask(server, path, If_None_Match='"other"')[0] == 200


def test_head_gives_the_headers_alone(server: str) -> None:
    status, headers, body = ask(server, "/", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) == (FOLDER / "index.html").stat().st_size


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/../page.py", "/page/%2e%2e/page.py", "/page/index.html"]
)
def test_nothing_else_is_served(path: str, server: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_names_another_host(file: Path) -> None:
    text = file.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"(?:\w+:)?//[\w-]+\.[\w.-]+", text)
    assert not re.findall(r"@import|url\(", text)


def test_the_page_has_nothing_inline() -> None:
    html = (FOLDER / "index.html").read_text()
    assert not re.findall(r"\s(?:on\w+|style)\s*=", html)
    assert not re.findall(r"<style|<script(?![^>]*\ssrc=)|javascript:", html)


@pytest.mark.parametrize("file", [file for file in FILES if file.suffix == ".js"], ids=lambda file: file.name)
def test_no_script_turns_text_into_markup(file: Path) -> None:
    text = file.read_text()
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|\beval\b|new Function", text)


def test_whatever_the_page_and_its_scripts_refer_to_is_served() -> None:
    html = (FOLDER / "index.html").read_text()
    wanted = {"/" + path for path in re.findall(r'(?:src|href)="(page/[^"]+)"', html)}
    for file in FILES:
        if file.suffix == ".js":
            wanted |= {f"/page/{name}" for name in re.findall(r'from "\./([\w.]+)"', file.read_text())}
    assert wanted == set(PATHS) - {"/"}


def schemes() -> list[dict[str, str]]:
    """The colours of the light and the dark scheme."""
    css = (FOLDER / "style.css").read_text()
    return [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)
    ]


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", schemes(), ids=["light", "dark"])
def test_text_can_be_read_on_every_ground(scheme: dict[str, str]) -> None:
    """WCAG 2.2, 1.4.3: a contrast of at least 4.5."""

    def contrast(first: str, second: str) -> float:
        low, high = sorted((luminance(scheme[first]), luminance(scheme[second])))
        return (high + 0.05) / (low + 0.05)

    texts = ("ink", "soft", "accent", "asked", "measured", "forced", "alarm")
    pairs = [(text, ground) for text in texts for ground in ("paper", "tint")] + [("on-accent", "accent")]
    assert {pair: round(contrast(*pair), 2) for pair in pairs if contrast(*pair) < 4.5} == {}
