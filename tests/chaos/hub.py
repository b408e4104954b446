"""A stand-in for the Hugging Face hub: serves the files of one folder as one model, slowly, on this machine."""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

MODEL = "stand-in/policy"
"""The model's name on the hub."""
CHUNK, PAUSE = 2**15, 0.1
"""Bytes that are sent at once, and seconds between two sends: the weights take long enough to be struck, and the small
files no time."""


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serves the folder's files within the block; returns the address for HF_ENDPOINT."""

    class Handler(_Handler):
        files: ClassVar = {file.name: file for file in folder.iterdir() if file.is_file()}

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: the downloading process was killed."""


class _Handler(BaseHTTPRequestHandler):
    """The two kinds of addresses that a download asks for: a file of a revision, and facts on the model."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, Path]]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.removeprefix(f"/{MODEL}/resolve/").partition("/")[2]
        commit = hashlib.sha1(MODEL.encode()).hexdigest()
        if path.startswith(f"/{MODEL}/resolve/") and name in self.files:
            data = self.files[name].read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit}
            self._send(200, data, headers, body)
        elif path in (f"/api/models/{MODEL}", f"/api/models/{MODEL}/revision/main"):
            known = {"id": MODEL, "sha": commit, "siblings": [{"rfilename": name} for name in self.files], "tags": []}
            self._send(200, json.dumps(known).encode(), {"Content-Type": "application/json"}, body)
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, body)

    def _send(self, code: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        """The answer; of a file only what a download that goes on still lacks."""
        start = 0
        if code == 200 and (asked := self.headers.get("Range")):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers |= {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
            code = 206
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data) - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        for place in range(start, len(data) if body else 0, CHUNK):
            time.sleep(PAUSE if place > start else 0)
            self.wfile.write(data[place : place + CHUNK])

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""
