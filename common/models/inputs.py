"""What a producer accepted: a prompt, its line in `inputs/`, its seal."""

from typing import Any

import msgspec

from common.models.kinds import Endpoint, NonNegativeInt


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An accepted prompt without its key: the bytes that ride in the RQ job's own hash.

    Attributes:
        id: The author's id as JSON text: a string or a number, spelled as given.
        line: Line of the source file, from 1.
        source: Base name of the source file, empty for stdin.
        sample: Which of the prompt's samples, from 0.
        endpoint: The SGLang route.
        body: The request as the row gives it: content and the row's own parameters, in the
            endpoint's own shape (`messages` for chat, `prompt` for completions, `text` or
            `input_ids` and `sampling_params` for generate). The flags' parameters are not in it.
        extra: Members of the row that are no part of the request; they come back in the result.
        turns: How many answers are generated, one after the other (`--turns all`); a null in the
            `messages` of the body stands where each belongs. 0 for a request with one answer.
    """

    id: msgspec.Raw
    line: NonNegativeInt
    endpoint: Endpoint
    body: dict[str, Any]
    source: str = ""
    sample: NonNegativeInt = 0
    extra: dict[str, Any] = {}
    turns: NonNegativeInt = 0


RawRow = tuple[bytes, bytes, bytes]
"""An accepted prompt as the queue takes it: key (16 bytes), fingerprint (8), JSON of `Prompt`."""

HexRow = tuple[bytes, bytes, bytes]
"""The same as it stands in `inputs/`: key and fingerprint in hex."""


class InputRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an `inputs/` object: `{"key":…,"fp":…,"prompt":{…}}`.

    Attributes:
        key: 32 hex digits.
        fp: Fingerprint, 16 hex digits.
        prompt: JSON of a `Prompt`, kept as bytes so that feeding it to Redis costs no encoding.
    """

    key: str
    fp: str
    prompt: msgspec.Raw


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """A producer's last word, the object `inputs/SEQ-seal-HASH.json`.

    The run is sealed when the object of `inputs/` with the highest sequence is a seal that says so
    and no producer is open.

    Attributes:
        sealed: False when the producer said that more files will come.
        source: What was enqueued, for people.
        rows: Prompts that this producer added.
    """

    sealed: bool
    source: str
    rows: NonNegativeInt
    ended_at: str
