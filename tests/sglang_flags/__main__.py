"""`make wheels`: compare the record with the parsers in the wheels, or write it anew."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tests.sglang_flags import VERSIONS, record

_INSIDE = Path(__file__).with_name("inside.py")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _home() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HEADRACE_REAL_DIR") or cache / "headrace-real") / "wheels"


def _wheel(version: str, folder: Path) -> Path:
    for _ in range(2):
        found = sorted(folder.glob(f"sglang-{version}-*.whl"))
        if found:
            return found[0]
        _say(f"downloading SGLang {version}")
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
                *("--disable-pip-version-check", "--only-binary", ":all:"),
                *("--dest", str(folder), f"sglang=={version}"),
            ],
            check=True,
        )
    raise FileNotFoundError(f"no wheel of SGLang {version} came to {folder}")


def options_in(wheel: Path) -> list[dict[str, Any]]:
    """Ask the parser in a wheel for its options."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as packed:
            names = [
                name
                for name in packed.namelist()
                if name.startswith(("sglang/srt/server_args", "sglang/srt/arg_groups/"))
                or name == "sglang/srt/environ.py"
            ]
            packed.extractall(folder, names)
        told = subprocess.run(
            [sys.executable, str(_INSIDE), folder], check=True, capture_output=True, text=True
        )
    options: list[dict[str, Any]] = json.loads(told.stdout)
    return options


def main() -> int:
    """Say whether the record is true."""
    flags = argparse.ArgumentParser(prog="make wheels")
    flags.add_argument("--write", action="store_true", help="write the record anew")
    asked = flags.parse_args()
    folder = _home()
    folder.mkdir(parents=True, exist_ok=True)
    found = {version: options_in(_wheel(version, folder)) for version in VERSIONS}
    if asked.write:
        record.write(found)
        _say(f"{record.PATH.name}: written from {len(found)} wheels")
        return 0
    known = record.recorded()
    wrong = [version for version in VERSIONS if not record.same(known[version], found[version])]
    for version in VERSIONS:
        word = "DIFFERS from the record" if version in wrong else "as recorded"
        _say(f"SGLang {version}: {len(found[version])} options, {word}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
