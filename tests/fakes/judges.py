"""An HTTP server that answers POST requests by a script: for sandboxes, judges, and whatever else is asked that way."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Answer:
    """`body` None: silence until the server closes."""

    status: int = 200
    body: object = ""
    headers: dict[str, str] = field(default_factory=dict)


Reply = Callable[[dict, int], Answer]
"""(request, its number from 0) → answer."""


@dataclass
class ScriptedServer:
    """What it was asked, and how many requests it held at once."""

    url: str
    requests: list[dict] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    closing: threading.Event = field(default_factory=threading.Event)


@contextmanager
def scripted_server(reply: Reply) -> Iterator[ScriptedServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                number = len(state.requests)
                state.requests.append(request)
                state.num_open += 1
                state.most_open = max(state.most_open, state.num_open)
            try:
                answer = reply(request, number)
                if answer.body is None:
                    state.closing.wait(30)
                    return
                body = answer.body.encode() if isinstance(answer.body, str) else json.dumps(answer.body).encode()
                self.send_response(answer.status)
                for name, value in {**answer.headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client gave up
            finally:
                with state.lock:
                    state.num_open -= 1

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = ScriptedServer(f"http://127.0.0.1:{server.server_port}/run_code")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
