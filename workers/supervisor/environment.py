"""Look at where a server is to be launched: its SGLang, its model, its port, its GPU's memory.

The version comes from the environment's own metadata, within a second: importing SGLang itself
takes torch and half a minute.
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from common.errors import BackendError, UsageError
from common.replacing import replace_file

ASK_LIMIT_S = 60.0
FETCH_LIMIT_S = 60.0
_MIB = 1 << 20

_ASK_VERSION = r"""
import importlib.metadata, importlib.util, pathlib, re
try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    version = ""
    found = importlib.util.find_spec("sglang")  # a checkout that was never installed
    for place in (found.submodule_search_locations or ()) if found else ():
        for path in (pathlib.Path(place, "_version.py"), pathlib.Path(place, "version.py")):
            text = path.read_text() if path.is_file() else ""
            told = re.search("version.* = [\"']([0-9][^\"']*)", text)
            version = version or (told[1] if told else "")
print("sglang", version)
"""


def sglang_version(python: str, environment: dict[str, str]) -> str:
    """Ask an interpreter which SGLang it has, as it would find it from this folder.

    Args:
        python: Path or name of it.
        environment: Variables that the server will have.

    Raises:
        UsageError: There is no such interpreter, or no SGLang in it.
    """
    path = shutil.which(python)
    if path is None:
        what = "may not be run" if Path(python).exists() else "is not there"
        raise UsageError(
            f"--python {python} {what}: give the interpreter of SGLang's own environment, "
            "as in --python /opt/sglang/bin/python"
        )
    try:
        told = subprocess.run(  # noqa: S603 - what the user told us to launch
            [path, "-c", _ASK_VERSION],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"--python {python} did not say within {ASK_LIMIT_S:.0f} s which SGLang it has"
        ) from None
    except OSError as error:
        raise UsageError(f"--python {python} cannot be run: {error.strerror or error}") from error
    found = re.search(r"^sglang (\S*)$", told.stdout, re.MULTILINE)
    if found is None:
        last = (told.stderr.strip().splitlines() or [f"exit {told.returncode}"])[-1]
        raise UsageError(f"--python {python} is no Python that works: {last}")
    if not found[1]:
        raise UsageError(
            f"{path} has no SGLang: give the interpreter of SGLang's own environment with "
            "--python, or install it there"
        )
    return found[1]


_FETCH_CONFIG = r"""
import sys
from huggingface_hub import hf_hub_download
hf_hub_download(sys.argv[1], "config.json")
"""


def fetch_config(model: str, python: str, environment: dict[str, str]) -> bool:
    """Have a model's config.json fetched as its server would fetch it; False where it cannot be.

    A hybrid model wants another launch line than others, also the first time, before its files are
    here. It is the server's own library that asks, with the server's settings: its hub, its token,
    or no network at all.

    Args:
        model: `owner/name`.
        python: As for `sglang_version`.
        environment: As for `sglang_version`.
    """
    path = shutil.which(python)
    if path is None or Path(model).expanduser().exists() or not _HUB_NAME.fullmatch(model):
        return False
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(  # noqa: S603 - what the user told us to launch
            [path, "-c", _FETCH_CONFIG, model],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FETCH_LIMIT_S,
            check=True,
        )
        return True
    return False


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def refuse_missing_model(model: str) -> None:
    """Refuse what is meant as a path and is none; a name is fetched by the server.

    Raises:
        UsageError: Naming it.
    """
    path = Path(model).expanduser()
    looks_like_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if "://" in model or path.exists() or not looks_like_path:
        return
    parent = next(each for each in (path, *path.parents) if each.exists())
    raise UsageError(f"--model {model} is not there ({parent} is the last part that is)")


def refuse_taken_port(host: str, port: int) -> None:
    """Refuse a port on which somebody listens.

    Raises:
        BackendError: Naming who does, where the system tells.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BackendError(
                f"port {port} cannot be had: {_holder(port)}; end that one, or give another --port"
            ) from error


def _holder(port: int) -> str:
    """Say who has a port, as far as the system tells."""
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and connection.pid and connection.laddr and connection.laddr[1] == port:
                process = psutil.Process(connection.pid)
                # Not its arguments, which may hold a key.
                return f"{process.name()} (pid {connection.pid}) listens there"
    return "another user's process listens there, or a connection of this machine has it"


def gpu_bytes(devices: str) -> float | None:
    """Say how much memory the smallest of some GPUs has; None where nvidia-smi does not tell.

    Args:
        devices: As `CUDA_VISIBLE_DEVICES` names them.
    """
    if shutil.which("nvidia-smi") is None or not devices:
        return None
    ask = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        told = subprocess.run(  # noqa: S603 - the driver's own tool
            [*ask, "-i", devices],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_LIMIT_S,
            check=True,
        )
        return min(float(line) for line in told.stdout.split("\n") if line.strip()) * _MIB
    return None


def server_environment(
    devices: str, *, environment: dict[str, str] | None = None
) -> dict[str, str]:
    """Give a server the variables of this process, but for those that are ours.

    What is ours may hold a password of Redis, or the servers' key, which goes another way.

    Args:
        devices: For `CUDA_VISIBLE_DEVICES`.
        environment: This process's when None.
    """
    ours = dict(os.environ) if environment is None else environment
    kept = {name: value for name, value in ours.items() if not _is_ours(name)}
    # Its lines come as they are written, also those of a process that is about to die.
    return {"PYTHONUNBUFFERED": "1", **kept, "CUDA_VISIBLE_DEVICES": devices}


_SIMULATOR = "HEADRACE_SIM_"


def _is_ours(name: str) -> bool:
    ours = name.startswith(("HEADRACE_", "RQ_REDIS_")) or name == "REDIS_URL"
    return ours and not name.startswith(_SIMULATOR)


def key_arguments(path: Path, secret: str) -> Sequence[str]:
    """Give a server its key by a file: arguments can be read by everybody on the machine.

    Args:
        path: Of the file, which ends in .yaml; only its owner may read it.
        secret: Empty for no key.

    Raises:
        OSError: It cannot be written.
    """
    if not secret:
        return ()
    text = secret.replace("\\", "\\\\").replace('"', '\\"')
    replace_file(path, f'api-key: "{text}"\n'.encode(), mode=0o600)
    return ("--config", str(path.resolve()))
