"""The page served at `/`: a chat and the plan. `page_routes` gives its files as routes; called by `create_app`."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "web"

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    # Nothing from elsewhere, nothing inline, in nobody's frame; text that a model wrote can never become a script.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    # Asked for again each time, and answered 304 while it is the same: an upgrade shows at once.
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """`/` and `/page/NAME` for every file of the page, read once. Needs no key: what they fetch does."""
    files = {path.name: path for path in sorted(FOLDER.iterdir()) if path.suffix in CONTENT_TYPES}
    index = files.pop("index.html")
    return [_route("/", index), *(_route(f"/page/{name}", path) for name, path in files.items())]


def _route(url: str, path: Path) -> Route:
    body = path.read_bytes()
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"'}

    async def serve(request: Request) -> Response:
        if _matches(request.headers.get("If-None-Match", ""), headers["ETag"]):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=CONTENT_TYPES[path.suffix])

    return Route(url, serve, methods=["GET"], include_in_schema=False)


def _matches(asked: str, etag: str) -> bool:
    """A proxy that compresses makes the tag a weak one."""
    return any(tag.strip().removeprefix("W/") in (etag, "*") for tag in asked.split(","))
