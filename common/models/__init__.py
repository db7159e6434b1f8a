"""The records that cross a border: input row, run, result row, manifest, counters. Pure.

All are msgspec structs: decode at every border, since constraints hold at decoding and not at
construction. `schema` numbers grow only by adding members.
"""

from common.models.inputs import HexRow, InputRow, Prompt, RawRow, Seal
from common.models.kinds import Endpoint, NonNegativeInt, Outcome, PositiveInt, State
from common.models.queued import Claim, Entry, KeptTurns, Result
from common.models.rows import Choice, CompletionRow, FailureRow, Turn, Usage
from common.models.runs import Counts, Params, RunRecord
from common.models.stored import Manifest, PartFile, Record

__all__ = [
    "Choice",
    "Claim",
    "CompletionRow",
    "Counts",
    "Endpoint",
    "Entry",
    "FailureRow",
    "HexRow",
    "InputRow",
    "KeptTurns",
    "Manifest",
    "NonNegativeInt",
    "Outcome",
    "Params",
    "PartFile",
    "PositiveInt",
    "Prompt",
    "RawRow",
    "Record",
    "Result",
    "RunRecord",
    "Seal",
    "State",
    "Turn",
    "Usage",
]
