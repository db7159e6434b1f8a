"""Lead a conversation whose every answer is generated: what the next request holds, what is kept.

Pure. A prompt of several turns (`--turns all`) is one job in one slot; its requests go one after
the other to the same server, which has the beginning of each in its prefix cache. The messages of
the prompt hold a null where an answer belongs; a turn's request holds all before its null, with
the generated answers in place of the earlier ones, exactly as the row will hold them: with their
reasoning, of which the server's chat template takes what its model is meant to see.

A finished turn is kept as one JSON line; the lines so far ride on the job in Redis (`turn.lua`),
so whoever has the job next goes on behind them. The last turn's needs none: it ends the prompt.
"""

import msgspec

from common.models import Turn, Usage
from workers.client.answers import Answer
from workers.client.requests import RawPrompt
from workers.client.rows import Completion, assistant_message

USELESS = frozenset({"other", "stolen", "changed", "gone", "forgotten"})
"""Words of Redis for a turn that it does not take: what this process goes on to generate for the
prompt would be dropped, or would be built on a turn that is not the one kept."""

_NULL = b"null"

_encode = msgspec.json.encode
_pieces = msgspec.json.Decoder(list[msgspec.Raw])


class _Kept(msgspec.Struct, frozen=True):
    """A line: the answer as a message, and the rest of what is known of the turn."""

    message: msgspec.Raw
    turn: Turn


_kept = msgspec.json.Decoder(_Kept)


class Conversation:
    """The turns of one prompt.

    Args:
        prompt: As it was accepted, with `turns` of at least 1.
        kept: Finished turns, as they were kept on the job.

    Attributes:
        kept: The finished turns, a JSON line each.
        done: The same as figures, the last turn too once it has come.

    Raises:
        ValueError: Prompt or kept turns cannot be read.
    """

    def __init__(self, prompt: RawPrompt, kept: bytes = b"") -> None:
        self._prompt = prompt
        self._messages = _pieces.decode(prompt.body.get("messages", msgspec.Raw(b"[]")))
        self._holes = [at for at, each in enumerate(self._messages) if bytes(each) == _NULL]
        if len(self._holes) != prompt.turns or not self._holes:
            raise ValueError(f"{len(self._holes)} answers are asked for, not {prompt.turns}")
        self.kept = kept
        self.done: list[Turn] = []
        for line in kept.split(b"\n")[:-1]:
            found = _kept.decode(line)
            self._take(found.turn, found.message)
        if len(self.done) >= prompt.turns:
            raise ValueError(f"{len(self.done)} turns are kept of {prompt.turns}")

    @property
    def number(self) -> int:
        """Which turn is next, from 1."""
        return len(self.done) + 1

    @property
    def is_last(self) -> bool:
        """Whether the next turn ends the conversation."""
        return self.number == len(self._holes)

    @property
    def messages(self) -> bytes:
        """JSON list of the messages before the next answer."""
        return b"[%b]" % b",".join(self._messages[: self._holes[len(self.done)]])

    @property
    def prompt(self) -> RawPrompt:
        """The prompt as it is to be asked now, for the next answer."""
        body = {**self._prompt.body, "messages": msgspec.Raw(self.messages)}
        return msgspec.structs.replace(self._prompt, body=body)

    def finish_turn(self, answer: Answer, figures: Turn) -> None:
        """Take the next turn, which is not the last, and keep what its row will not hold twice."""
        choice = answer.choices[0]
        turn = msgspec.structs.replace(
            figures,
            matched_stop=choice.matched_stop,
            logprobs=choice.logprobs,
            prompt_token_ids=choice.prompt_token_ids,
            output_token_ids=choice.output_token_ids,
            token_ids=choice.token_ids,
            loss_mask=choice.loss_mask,
        )
        message = msgspec.Raw(assistant_message(choice))
        self._take(turn, message)
        self.kept += _encode(_Kept(message, turn)) + b"\n"

    def completed(self, done: Completion, figures: Turn) -> Completion:
        """Make the whole conversation's completion from that of its last turn."""
        messages = self.messages
        self.done.append(figures)
        return msgspec.structs.replace(
            done,
            messages=messages,
            usage=self._usage,
            flags=tuple(dict.fromkeys(flag for turn in self.done for flag in turn.flags)),
            latency_s=sum(turn.latency_s for turn in self.done),
            turns=tuple(self.done),
        )

    @property
    def at(self) -> int:
        """Where the next answer belongs in the messages, from 0."""
        return self._holes[len(self.done)]

    @property
    def _usage(self) -> Usage:
        return Usage(**{
            name: sum(getattr(turn.usage, name) for turn in self.done)
            for name in Usage.__struct_fields__
        })  # fmt: skip

    @property
    def attempts(self) -> int:
        """Add up the requests that the finished turns took."""
        return sum(turn.attempts for turn in self.done)

    def _take(self, turn: Turn, message: msgspec.Raw) -> None:
        self._messages[self.at] = message
        self.done.append(turn)
