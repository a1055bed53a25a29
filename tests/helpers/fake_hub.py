"""A Hugging Face Hub of one repository, on this machine: what `huggingface_hub` asks of the real one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

REPO = "owner/tiny"
COMMIT = "c" * 40
_PARTS = 8


@contextlib.contextmanager
def hub(files: Path, *, pause_s: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and the names of the files that were fetched from it so far.

    Args:
        files: directory with those of the repository.
        pause_s: before each eighth of a file.
    """
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, *, with_body: bool) -> None:
            path = urlsplit(self.path).path
            names = sorted(file.name for file in files.iterdir())
            if path.startswith(f"/api/models/{REPO}/tree/"):
                sizes = {name: (files / name).stat().st_size for name in names}
                self._send_json([{"type": "file", "path": name, "size": sizes[name], "oid": "0"} for name in names])
                return
            if path.startswith(f"/api/models/{REPO}"):
                self._send_json({"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]})
                return
            file = files / path.rpartition("/")[2]
            if not path.startswith(f"/{REPO}/resolve/") or not file.is_file():
                self.send_error(404)
                return
            if with_body:
                fetched.append(file.name)
            self._send(file.read_bytes(), with_body=with_body)

        def _send_json(self, answer: object) -> None:
            self._send(json.dumps(answer).encode(), with_body=True)

        def _send(self, body: bytes, *, with_body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            step = max(-(-len(body) // _PARTS), 1)
            for start in range(0, len(body) if with_body else 0, step):
                time.sleep(pause_s)
                self.wfile.write(body[start : start + step])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
