"""A server that streams a fixed answer, for tests of the clients."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECES = ["one", " two", " three"]


class StubServer:
    """Answers on a free port of loopback; a request for the model "bad" gets a 400.

    Args:
        has_tokenize: serve /tokenize.
    """

    def __init__(self, has_tokenize: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send_json(200, {"data": [{"id": "stub"}]})

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(length))
                stub.authorizations.append(self.headers["Authorization"])
                if self.path == "/tokenize":
                    status = 200 if has_tokenize else 404
                    self._send_json(status, {"tokens": [7, 8, 9]})
                    return
                stub.bodies.append(body)
                if body["model"] == "bad":
                    self._send_json(400, {"error": {"message": "no such model"}})
                    return
                self._send_stream(self.path.endswith("/chat/completions"))

            def _send_json(self, status: int, value: Any) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _send_stream(self, is_chat: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                choices: list[dict[str, Any]] = [
                    {"delta": {"content": piece}} if is_chat else {"text": piece}
                    for piece in PIECES
                ]
                if is_chat:
                    choices.insert(0, {"delta": {"role": "assistant", "content": ""}})
                for choice in choices:
                    self._send_chunk({"choices": [choice | {"finish_reason": None}]})
                usage = {"prompt_tokens": 5, "completion_tokens": 3}
                self._send_chunk({"choices": [], "usage": usage})
                self.wfile.write(b"data: [DONE]\n\n")

            def _send_chunk(self, chunk: dict[str, Any]) -> None:
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
