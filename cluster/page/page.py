"""The page at `/`: one static file, which needs no build step and no resources from another host."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_FILE = Path(__file__).parent / "index.html"


def page() -> Callable[[Request], Awaitable[Response]]:
    """GET /: the same page for everybody. It reads its data from routes that require a key if the server has keys."""
    html = _FILE.read_text()
    headers = {
        # The policy allows the page's own script and style, by their hashes, and requests to its own host.
        "content-security-policy": (
            "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            f"frame-ancestors 'none'; style-src {_hash(html, 'style')}; script-src {_hash(html, 'script')}"
        ),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
    }

    async def get(request: Request) -> Response:
        return Response(html, headers=headers, media_type="text/html")

    return get


def _hash(html: str, element: str) -> str:
    """The Content-Security-Policy source of the file's only `<script>` or `<style>`."""
    [text] = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
