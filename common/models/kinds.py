"""The words and numbers that records are made of."""

from typing import Annotated, Literal

import msgspec

Endpoint = Literal["chat", "completions", "generate"]
"""Which SGLang route a prompt asks for: /v1/chat/completions, /v1/completions, /generate."""

Outcome = Literal["completed", "failed", "cancelled"]
"""What a prompt ends as. A failure and a cancellation are rows of `failures/`."""

State = Literal["queued", "completed", "failed", "cancelled"]
"""What the ledger says of a key."""

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
