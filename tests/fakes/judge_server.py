"""A judge behind HTTP that answers as its prompt says, and remembers when it was asked and how often at once."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORK_S = 0.05
"""Of an ordinary judgement, so that requests overlap."""


class JudgeServer:
    """`with JudgeServer() as server:` serves `server.url` from threads.

    Prompts: `score X` names a score; `busy X` is 429 with Retry-After the first time it is asked, then a score;
    `429`, `500`, `400` are that for ever; `garbage` is no JSON; `silence` no answer; anything else comes back as text.
    """

    def __init__(self, retry_after: str = "1") -> None:
        self.starts_s: list[float] = []
        self.busy_until_s = 0.0  # what Retry-After asked for
        self.most_in_flight = 0
        self._retry_after = retry_after
        self._asked: Counter[str] = Counter()
        self._in_flight = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self) -> JudgeServer:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.answer(self, body["messages"][0]["content"])

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def answer(self, handler: BaseHTTPRequestHandler, prompt: str) -> None:
        with self._lock:
            self.starts_s.append(time.monotonic())
            self._asked[prompt] += 1
            first = self._asked[prompt] == 1
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            self._closed.wait(60 if prompt == "silence" else WORK_S)
        finally:
            with self._lock:
                self._in_flight -= 1
        if prompt == "silence":
            return
        if prompt in ("400", "429", "500") or (prompt.startswith("busy") and first):
            status = int(prompt) if prompt.isdigit() else 429
            headers = {"Retry-After": self._retry_after} if prompt.startswith("busy") else {}
            if headers:
                self.busy_until_s = time.monotonic() + float(self._retry_after)
            self._send(handler, status, "no", headers)
        elif prompt == "garbage":
            self._send(handler, 200, "<html>", {})
        else:
            text = prompt.replace("busy", "I say: score")
            self._send(handler, 200, json.dumps({"choices": [{"message": {"content": text}}]}), {})

    def _send(self, handler: BaseHTTPRequestHandler, status: int, text: str, headers: dict[str, str]) -> None:
        body = text.encode()
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
