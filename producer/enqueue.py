"""`producer enqueue`: from files of prompts to queued jobs, so that a kill anywhere costs nothing.

    1. find the run, in Redis or else in the store, and refuse what contradicts it     nothing is
    2. pass 1: read and check every row, spool it on disk                              written
    3. compare every prompt with the ledger
    4. make the run; register as open; remove `_SUCCESS` where prompts are added
    5. pass 2: `inputs/`, then the queue
    6. seal, and close

Ended between any two of these, the same call again goes on: nothing counts twice, since a prompt
is its key. A producer that was killed stays registered as open, so the run cannot pass for
complete before the rest has come.
"""

import tempfile
from pathlib import Path

from producer.meter import Meter, MeterFor
from producer.reading import read
from producer.request import Outcome, Request, Say


def enqueue(request: Request, *, say: Say, meter: MeterFor = Meter) -> Outcome:
    """Carry out one call; see the module.

    Raises:
        HeadraceError: With the exit code of the command; rows that cannot be used are an outcome.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        if request.dry_run:
            return read(request, request.rules, Path(folder), meter=meter)[0]
        # Redis' client is slow to import, and a dry run needs none.
        from producer.queueing import Call  # noqa: PLC0415

        return Call(request, Path(folder), say=say, meter=meter).carry_out()
