"""An OpenAI-compatible API over HTTP that answers as a test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def api(answer: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The URL of an API that answers with `answer(body)`, a status and an error, or 200 and a message with a
    `finish_reason` other than `stop`. And the bodies of the requests."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, content = answer(bodies[-1])
            if status == 200:
                message = {"role": "assistant", **content}
                reason = message.pop("finish_reason", "stop")
                content = {"choices": [{"message": message, "finish_reason": reason}]}
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
