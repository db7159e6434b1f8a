"""Where S3 credentials come from: a file, a command, a container's or a machine's endpoint.

Each can be told to hand out others, or none, while a process that has asked before goes on.
"""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typing_extensions import override

SOURCES = ("file", "process", "container", "machine")

_FAR = "2999-01-01T00:00:00Z"
_STATIC = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class Login:
    """One source of credentials for this process and its children.

    Attributes:
        env: What leads to it.
    """

    def __init__(self, source: str, folder: Path, port: int) -> None:
        self._source = source
        self._file = folder / "handed-out"
        self.env: dict[str, str] = {}
        if source == "file":
            self.env["AWS_SHARED_CREDENTIALS_FILE"] = str(self._file)
        elif source == "process":
            script = folder / "credentials.py"
            script.write_text(f"print(open({str(self._file)!r}).read())")
            config = folder / "config"
            config.write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
            self.env["AWS_CONFIG_FILE"] = str(config)
        elif source == "container":
            self.env["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = f"http://127.0.0.1:{port}/container"
        else:
            self.env["AWS_EC2_METADATA_DISABLED"] = "false"
            self.env["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = f"http://127.0.0.1:{port}/"

    def hand_out(self, key: str) -> None:
        """Give these credentials from now on; they never run out by themselves."""
        if self._source == "file":
            text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = fake\n"
        else:
            secret = {"AccessKeyId": key, "SecretAccessKey": "fake"}
            token = "SessionToken" if self._source == "process" else "Token"
            text = json.dumps(
                {**secret, token: "t", "Expiration": _FAR, "Version": 1, "Code": "Success"}
            )
        beside = self._file.with_suffix(".new")
        beside.write_text(text)
        beside.replace(self._file)

    def take_away(self) -> None:
        """Give nothing that could be read as credentials."""
        self._file.write_text("nobody is logged in")

    def answer(self, path: str) -> bytes:
        if path.endswith("/security-credentials/"):
            return b"role"
        if path.endswith("/api/token"):
            return b"token"
        return self._file.read_bytes()


@contextmanager
def login(source: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Login]:
    """Make one of SOURCES what this process finds, in place of the tests' static credentials."""
    answer: list[Callable[[str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = answer[0](self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_PUT = do_GET  # noqa: N815 - a name of http.server

        @override
        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = Login(source, folder, server.server_address[1])
        answer.append(made.answer)
        for name in _STATIC:
            patch.delenv(name, raising=False)
        for name, value in made.env.items():
            patch.setenv(name, value)
        yield made
        server.shutdown()
