"""What the simulator's control endpoint counts is in its log by then."""

from pathlib import Path

import msgspec

from workers.simulator.control import state_of
from workers.simulator.journal import Ident
from workers.simulator.log import read_log
from workers.simulator.settings import Settings
from workers.simulator.simulator import Simulator


async def test_a_request_that_the_state_counts_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    settings = msgspec.structs.replace(Settings(), ports=(0,), log=str(log))
    simulator = Simulator(settings)
    await simulator.servers[0].start()
    record = simulator.servers[0].record

    record.journal.begin(record.port, Ident("r", "d", 1), open_count=1)
    assert read_log(log).requests == 0, "no round of the loop has ended"
    state_of(simulator.servers[0])

    assert read_log(log).requests == 1
    simulator.servers[0].refuse()
    simulator.close()
