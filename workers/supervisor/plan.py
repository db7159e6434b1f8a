"""Plan one launch of a server: the installed version, its launch line, its environment.

Made anew for each start, since SGLang may have been upgraded in between.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from common.errors import UsageError
from common.ids import canonical_json, rows_sha256
from workers.capacity.diagnosis import before_launch
from workers.capacity.model_files import model_folder, shape_at, weights_bytes
from workers.capacity.model_shape import ModelShape
from workers.capacity.strategies import USUAL_RATIO, pool_bytes_of
from workers.supervisor import environment
from workers.supervisor.launch_line import Launch, Line, launch_line, value_of, visible_devices
from workers.supervisor.records import FOLDER, Wanted
from workers.timing import Timing


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor of one server is told.

    Attributes:
        name: `gpu0@host`.
        gpus: Which ones the server spans.
        model: Path or name.
        python: SGLang's interpreter.
        port: Where the server listens.
        strategy: See `launch_line.STRATEGIES`; None where nobody asked.
        arguments: SGLang's own.
        state_dir, log_dir: Where records and logs go.
        rss_limit_bytes: Its processes together; None for no limit.
        drain_limit_s: What open requests get before a planned end.
        start_limit_s: Until the first token; None for no limit.
        api_key: Of the server; empty for none.
        parent_pid: Leave when this process is not our parent any more; None where nobody watches.
        timing: How often it looks.
    """

    name: str
    gpus: tuple[int, ...]
    model: str
    python: str
    port: int
    strategy: str | None = None
    arguments: tuple[str, ...] = ()
    state_dir: Path = Path(".headrace")
    log_dir: Path = Path("sglang_logs")
    rss_limit_bytes: int | None = None
    drain_limit_s: float = 600.0
    start_limit_s: float | None = None
    api_key: str = ""
    parent_pid: int | None = None
    timing: Timing = Timing()

    @property
    def flags(self) -> str:
        """What decides the launch, in short: an order holds over the flags it was given over."""
        decides = [self.python, self.model, self.gpus, self.port, self.strategy, self.arguments]
        return rows_sha256(canonical_json(decides))[:16]

    @property
    def label(self) -> str:
        """Its GPUs: gpu0, gpu0-1."""
        return self.name.partition("@")[0]

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self.log_dir / f"sglang_{self.label}.log"

    @property
    def key_file(self) -> Path:
        """Where SGLang reads its key from, while it starts."""
        return self.state_dir / FOLDER / f"{self.name}.key.yaml"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One launch.

    Attributes:
        line: What is launched; the key is not in it.
        version: SGLang's.
        environment: Of the server, whole.
        devices: What `CUDA_VISIBLE_DEVICES` is in that.
        key: Whether it gets the key by a file.
        hash: Of all that decides it: a server that runs by it need not be launched anew.
        notes: What people should know.
        shape: What its model's requests cost.
    """

    line: Line
    version: str
    environment: Mapping[str, str]
    devices: str
    key: bool
    hash: str
    notes: tuple[str, ...]
    shape: ModelShape

    @property
    def strategy(self) -> str:
        """Which one it asks for; empty where it makes no difference."""
        return self.line.strategy


def plan_launch(options: ServeOptions, order: Wanted | None = None) -> Plan:
    """Plan a launch.

    Args:
        options: The supervisor's own.
        order: What is asked beyond them.

    Raises:
        UsageError: It cannot be launched so.
    """
    devices = visible_devices(options.gpus, os.environ)
    server_env = environment.server_environment(devices)
    environment.refuse_missing_model(options.model)
    version = environment.sglang_version(options.python, server_env)
    arguments = (*options.arguments, *((order.arguments if order else None) or ()))
    strategy = (order.strategy if order else None) or options.strategy
    shape = _shape(options, server_env, arguments)
    notes: list[str] = []
    if strategy == "best":
        strategy = _best(options, shape, version, devices, arguments, notes)
    line = launch_line(
        Launch(
            version=version,
            python=options.python,
            model=str(Path(options.model).expanduser()) if "~" in options.model else options.model,
            gpus=options.gpus,
            port=options.port,
            strategy=strategy,
            recurrent=shape.recurrent,
            arguments=arguments,
        )
    )
    key = bool(options.api_key) and not line.config
    if options.api_key and line.config:
        notes.append("--config: a key stands in that file (api-key), the variable's is not given")
    return Plan(
        line=line,
        version=version,
        environment=server_env,
        devices=devices,
        key=key,
        hash=rows_sha256(canonical_json([line.arguments, version, devices, key]))[:16],
        notes=(*notes, *line.notes),
        shape=shape,
    )


def _shape(
    options: ServeOptions, server_env: dict[str, str], arguments: tuple[str, ...]
) -> ModelShape:
    """Work out what the model's requests cost; one that is not here yet tells by its config."""
    if model_folder(options.model) is None:
        environment.fetch_config(options.model, options.python, server_env)
    return shape_at(
        options.model,
        tp=len(options.gpus),
        ssm_dtype=value_of(arguments, "--mamba-ssm-dtype"),
        kv_dtype=value_of(arguments, "--kv-cache-dtype"),
    )


def _best(
    options: ServeOptions,
    shape: ModelShape,
    version: str,
    devices: str,
    arguments: tuple[str, ...],
    notes: list[str],
) -> str | None:
    """Choose the strategy with most slots for this model."""
    memory = environment.gpu_bytes(devices)
    weights = weights_bytes(options.model)
    fraction = _number(arguments, "--mem-fraction-static")
    ratio = _number(arguments, "--mamba-full-memory-ratio")
    pool_bytes = None
    if memory and weights:
        pool_bytes = pool_bytes_of(memory, weights / len(options.gpus), mem_fraction=fraction)
    choice = before_launch(
        shape,
        version=version,
        pool_bytes=pool_bytes,
        ratio=USUAL_RATIO if ratio is None else ratio,
    )
    # Its number of slots is an estimate: one too high, asked for, would end the server's start.
    notes.append(f"best: {choice.words}")
    return choice.strategy


def _number(arguments: tuple[str, ...], flag: str) -> float | None:
    """Read a number that SGLang is given; None where it is not.

    Raises:
        UsageError: It is none, or below zero.
    """
    text = value_of(arguments, flag)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise UsageError(f"{flag} {text}: give a number, as in `-- {flag} 0.8`")
    return number
