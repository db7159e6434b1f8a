"""A Python environment in which `sglang` is the simulator: what is served from in a trial.

    FOLDER/VERSION/bin/python              this interpreter, with that `sglang` before any other
    FOLDER/VERSION/lib/sglang/             its `launch_server` is `workers.simulator.launched`
    FOLDER/VERSION/lib/sglang-….dist-info  so that whoever asks for the version hears it
    FOLDER/model/config.json               what a hybrid model says of itself, and no more of one

So a simulated server is found, asked for its version, called, watched and stopped by the same code
as a real one: only which python it is differs.
"""

import json
import os
import shlex
import sys
from pathlib import Path

from workers.simulator.settings import Settings

VERSION_VARIABLE = "HEADRACE_SIM_SGLANG_VERSION"

_REPOSITORY = Path(__file__).resolve().parents[2]
_LAUNCH = '''\
"""Stands in for SGLang: see workers/simulator/launched.py."""

from workers.simulator.launched import main

if __name__ == "__main__":
    main()
'''


MODEL = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "hidden_size": 2048,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262_144,
}
"""Shape of the kind of model that the simulator's figures are fitted to."""


def simulated_model(folder: Path) -> Path:
    """Make the folder of a model whose shape is all that there is of it.

    Raises:
        OSError: It cannot be written.
    """
    home = (folder / "model").resolve()
    _write(home / "config.json", json.dumps(MODEL, indent=1) + "\n")
    return home


def simulated_python(folder: Path, version: str | None = None) -> Path:
    """Make the environment, or find it made, and give its python.

    Args:
        folder: Where; several processes may ask for the same.
        version: SGLang's; None takes HEADRACE_SIM_SGLANG_VERSION, else the simulator's default.

    Raises:
        OSError: It cannot be written.
    """
    version = version or os.environ.get(VERSION_VARIABLE) or Settings().sglang_version
    home = (folder / version).resolve()
    library = home / "lib"
    info = library / f"sglang-{version}.dist-info"
    paths = os.pathsep.join([str(library), str(_REPOSITORY)])
    texts = {
        library / "sglang" / "__init__.py": f'__version__ = "{version}"\n',
        library / "sglang" / "launch_server.py": _LAUNCH,
        info / "METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n",
        home / "bin" / "python": (
            "#!/bin/sh\n"
            f"export PYTHONPATH={shlex.quote(paths)}${{PYTHONPATH:+:$PYTHONPATH}}\n"
            f"export {VERSION_VARIABLE}={shlex.quote(version)}\n"
            f'exec {shlex.quote(sys.executable)} "$@"\n'
        ),
    }
    for path, text in texts.items():
        _write(path, text)
    return home / "bin" / "python"


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all: another process may be running it."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.chmod(0o755)
    draft.replace(path)
