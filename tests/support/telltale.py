"""An SGLang server that repeats what it was sent, as real errors do."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from typing_extensions import override

API_KEY = "canary-secret-of-the-server"
ADMIN_KEY = "canary-secret-of-its-admin"
NOTIFY = "canary-secret-of-the-hook"
PROMPT, ANSWER = "canary prompt text", "canary answer text"


class TellTale(http.server.BaseHTTPRequestHandler):
    """An SGLang server whose every error repeats what it was sent, headers and all."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[dict[str, int]] = {}

    @property
    def _page(self) -> str:
        """The path below that of the GPU."""
        return self.path.removeprefix("/gpu0").removeprefix("/gpu1")

    def do_GET(self) -> None:
        pages: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "tiny", "max_model_len": 4096}]},
            "/server_info": {
                "version": "0.5.23", "api_key": API_KEY, "admin_api_key": ADMIN_KEY,
                "model_path": "/models/tiny", "internal_states": [],
            },
        }  # fmt: skip
        page = pages.get(self._page)
        self._answer(404 if page is None else 200, page)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        if self.path == f"/hook/{NOTIFY}":
            self._answer(500, {"error": f"no such hook {NOTIFY}"})
        elif "rid" not in body or "headrace-probe" in body or "abort" in self.path:
            self._answer(200, answer("."))
        else:
            self._serve(body)

    def _serve(self, body: str) -> None:
        said = f"refused {body} with {self.headers.as_string()} by {API_KEY}"
        times = self.asked[body[:100]] = self.asked.get(body[:100], 0) + 1
        error = {"error": {"message": said, "code": 400}}
        if "refuse 400" in body:
            self._answer(400, error)
        elif "refuse 500" in body:
            self._answer(500, error)
        elif "break off" in body and times == 1:
            self.close_connection = True
            self.connection.close()
        else:
            self._answer(200, answer(ANSWER))

    def _answer(self, status: int, page: Any) -> None:
        data = json.dumps(page).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def answer(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }


@contextmanager
def telltale_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TellTale)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
