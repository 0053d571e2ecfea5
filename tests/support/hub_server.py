"""A local HTTP server that answers `huggingface_hub` as a Hub does, and counts the bytes that it sends."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

COMMIT = "a" * 40


@dataclass(slots=True)
class Hub:
    """Serves one folder as the repository `owner/name`."""

    folder: Path
    ranges: bool = True
    """Whether it supports byte ranges; some mirrors send the whole file."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes sent, by file."""
    url: str = ""

    def run(self, code: str, home: Path) -> subprocess.CompletedProcess[str]:
        """Run Python code in a process whose Hub is this one and whose cache is `home`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        env = kept | {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "NO_PROXY": "*", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
        )


class Server(ThreadingHTTPServer):
    """The listening socket, with the hub that it serves."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    """Answers the requests that `huggingface_hub` makes for one repository."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Stay silent."""

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.answer(body=False)

    def do_GET(self) -> None:
        """Answer in full."""
        self.answer(body=True)

    @property
    def hub(self) -> Hub:
        """The hub that the server answers for."""
        return cast("Server", self.server).hub

    def answer(self, *, body: bool) -> None:
        """Send the repository's metadata, its list of files, or a file."""
        path = self.path.partition("?")[0]
        files = {
            f.relative_to(self.hub.folder).as_posix(): f for f in sorted(self.hub.folder.rglob("*")) if f.is_file()
        }
        resolved = path.removeprefix("/owner/name/resolve/").partition("/")[2]
        if path.startswith("/api/models/owner/name/tree/"):
            listed = [{"type": "file", "path": n, "size": f.stat().st_size, "oid": oid(f)} for n, f in files.items()]
            self.reply(200, json.dumps(listed).encode(), body=body)
        elif path.startswith("/api/models/owner/name"):
            info = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": n} for n in files]}
            self.reply(200, json.dumps(info).encode(), body=body)
        elif resolved in files:
            self.send_file(resolved, body=body)
        else:
            self.reply(404, b"", body=body, headers={"X-Error-Code": "RepoNotFound"})

    def send_file(self, name: str, *, body: bool) -> None:
        """Send a file, or the range of it that was asked for."""
        raw = (self.hub.folder / name).read_bytes()
        headers = {"ETag": f'"{oid(self.hub.folder / name)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if not wanted or not self.hub.ranges:
            self.reply(200, raw, body=body, headers=headers, name=name)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or len(raw)) + 1, len(raw))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(raw)}"
        self.reply(206, raw[start:stop], body=body, headers=headers, name=name)

    def reply(
        self, status: int, raw: bytes, *, body: bool, headers: dict[str, str] | None = None, name: str = ""
    ) -> None:
        """Send `raw` and count the bytes sent."""
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        for offset in range(0, len(raw) if body else 0, 1 << 14):
            try:
                sent = self.wfile.write(raw[offset : offset + (1 << 14)])
            except OSError:  # the client stopped reading
                self.close_connection = True
                return
            self.hub.sent[name] = self.hub.sent.get(name, 0) + sent


@contextmanager
def serving(folder: Path, *, ranges: bool = True) -> Iterator[Hub]:
    """Serve `folder` until the block ends."""
    hub = Hub(folder, ranges)
    server = Server(hub)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def oid(file: Path) -> str:
    """Return a content hash of the length that git uses."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:40]
