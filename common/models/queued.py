"""What crosses between Redis and the worker side: claim, result, stream entry."""

import msgspec

from common.models.kinds import Outcome


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One leased job, as the claim script hands it out.

    Attributes:
        run, uid: Whose prompt it is.
        key, fingerprint: 16 and 8 bytes; the job id is the key in hex.
        try_: Which try this is, from 1.
        attempts, deaths, lost: Charged attempts, server deaths and lost leases so far in this try.
        prompt: JSON of a `Prompt`.
        died_alone: Of the deaths, those with nothing else open at the server.
        turns: What `KeptTurns` has kept of a prompt with several turns; empty as a rule.
    """

    run: str
    uid: str
    key: bytes
    fingerprint: bytes
    try_: int
    attempts: int
    deaths: int
    lost: int
    prompt: bytes
    died_alone: int = 0
    turns: bytes = b""

    def ended(
        self,
        outcome: Outcome,
        row: bytes,
        *,
        reason: str = "",
        tokens: tuple[int, int] = (0, 0),
        flags: tuple[str, ...] = (),
    ) -> "Result":
        """Make the result that ends this prompt; `tokens` are those of prompt and completion."""
        return Result(
            run=self.run,
            uid=self.uid,
            key=self.key,
            fingerprint=self.fingerprint,
            try_=self.try_,
            outcome=outcome,
            row=row,
            input_tokens=tokens[0],
            output_tokens=tokens[1],
            flags=flags,
            reason=reason,
        )


class KeptTurns(msgspec.Struct, frozen=True, kw_only=True):
    """The finished turns of a prompt that is not finished, to be kept on its job.

    Attributes:
        run, uid, key, fingerprint, try_: Copied from the claim.
        turns: All of them so far, a JSON line each: a longer text of the same prompt begins with
            the shorter ones, and that is how Redis tells whether it continues what is kept.
    """

    run: str
    uid: str
    key: bytes
    fingerprint: bytes
    try_: int
    turns: bytes


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker group reports of a prompt that has ended; one entry of a result stream.

    Attributes:
        run, uid, key, fingerprint, try_: Copied from the claim.
        row: A finished line, `CompletionRow` or `FailureRow` as JSON, without newline.
        flags: Of `common.quality.FLAGS`; counted.
        reason: Why it failed, one word; empty for a completion.
        repeat: This call repeats one whose answer was lost: a drop is not counted as a duplicate.
    """

    run: str
    uid: str
    key: bytes
    fingerprint: bytes
    try_: int
    outcome: Outcome
    row: bytes
    input_tokens: int = 0
    output_tokens: int = 0
    flags: tuple[str, ...] = ()
    reason: str = ""
    repeat: bool = False


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A `Result` as the sink reads it back from a result stream.

    Attributes:
        entry_id: Redis stream id.
    """

    entry_id: str
    key: bytes
    fingerprint: bytes
    try_: int
    outcome: Outcome
    row: bytes
    input_tokens: int
    output_tokens: int
