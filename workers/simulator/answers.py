"""The bodies of finished requests, in the shape of the version asked for."""

import time
from typing import NamedTuple

import msgspec

from workers.simulator import text
from workers.simulator.checks import NEW_VERSION
from workers.simulator.open_request import OpenRequest
from workers.simulator.settings import Settings

CHARS_PER_TOKEN = 4
# Share of an answer's tokens that a reasoning model spends on thinking.
_THINKING = 0.6
_EOS = 151645
# First version whose chat choices call the answer's ids `response_token_ids`.
RENAMED_VERSION = (0, 5, 18)


class Outcome(NamedTuple):
    """How a request has ended.

    Attributes:
        reason: `stop`, `length` or `abort`.
        tokens: Generated, for each choice.
        matched: Matched stop token or text; None for `length` and `abort`.
        message: Of an abort.
    """

    reason: str
    tokens: int
    matched: int | str | None = None
    message: str = "Aborted"


def natural_outcome(request: OpenRequest) -> Outcome:
    """Say how a request ends that nothing disturbs."""
    if request.natural_tokens > request.tokens or not request.tokens:
        return Outcome("length", request.tokens)
    return Outcome("stop", request.tokens, _EOS)


def quote(value: object) -> str:
    """Write a value as JSON."""
    return msgspec.json.encode(value).decode()


class AnswerWriter:
    """Writes answers for one set of settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._new = settings.version >= NEW_VERSION
        self._tail = "" if self._new else ',"tool_calls":null'
        self._details = ',"completion_tokens_details":null' if self._new else ""

    def write(self, request: OpenRequest, outcome: Outcome) -> bytes:
        """Write the whole body of a 200."""
        if request.api == "generate":
            body = self._generate(request, outcome)
        elif request.api == "chat":
            body = self._chat(request, outcome)
        else:
            body = self._completions(request, outcome)
        return body.encode()

    def content(self, request: OpenRequest, tokens: int, choice: int) -> str:
        """Write the text of one choice as a JSON string, quotes included."""
        settings = self._settings
        if not tokens:
            return '""'
        size = settings.answer_bytes or tokens * CHARS_PER_TOKEN
        plain = text.answer_text(request.ident.digest, size, choice=choice)
        if not settings.dirty:
            return f'"{plain}"'
        return f'{quote(plain + text.DIRTY)[:-1]}{text.LONE_SURROGATE}"'

    def _chat(self, request: OpenRequest, outcome: Outcome) -> str:
        plan, tokens = request.plan, outcome.tokens
        matched = quote(outcome.matched)
        thought = self._thought(request, outcome) if plan.thinking else 0
        prompt_ids = _prompt_ids(request)
        choices = []
        for choice in range(plan.choices):
            content, reasoning = self.content(request, tokens, choice), "null"
            if thought:
                reasoning = self.content(request, thought, choice)
                content = self.content(request, tokens - thought, choice)
            choices.append(
                f'{{"index":{choice},"message":{{"role":"assistant","content":{content}'
                f',"reasoning_content":{reasoning}{self._tail}}},"logprobs":null'
                f',"finish_reason":"{outcome.reason}","matched_stop":{matched}'
                f"{prompt_ids}{self._output_ids(request, outcome, choice)}}}"
            )
        return self._openai(request, outcome, "chat.completion", choices, thought)

    def _completions(self, request: OpenRequest, outcome: Outcome) -> str:
        matched, prompt_ids = quote(outcome.matched), _prompt_ids(request)
        choices = [
            f'{{"index":{choice},"text":{self.content(request, outcome.tokens, choice)}'
            f',"logprobs":null,"finish_reason":"{outcome.reason}","matched_stop":{matched}'
            f"{self._output_ids(request, outcome, choice)}{prompt_ids}}}"
            for choice in range(request.plan.choices)
        ]
        return self._openai(request, outcome, "text_completion", choices, 0)

    def _openai(
        self, request: OpenRequest, outcome: Outcome, kind: str, choices: list[str], thought: int
    ) -> str:
        plan, completion = request.plan, outcome.tokens * len(choices)
        versions = ""
        if self._new:
            span = f'{{"version":"default","start":0,"end":{outcome.tokens}}}'
            versions = f',"weight_versions":[{span}]'
        return (
            f'{{"id":{quote(request.ident.rid)},"object":"{kind}","created":{int(time.time())}'
            f',"model":{quote(plan.model)},"choices":[{",".join(choices)}]'
            f',"usage":{{"prompt_tokens":{plan.prompt_tokens}'
            f',"total_tokens":{plan.prompt_tokens + completion}'
            f',"completion_tokens":{completion},"prompt_tokens_details":null'
            f',"reasoning_tokens":{thought}{self._details}}}'
            f',"metadata":{{"weight_version":"default"{versions}}}}}'
        )

    def _output_ids(self, request: OpenRequest, outcome: Outcome, choice: int) -> str:
        if not request.plan.output_ids:
            return ""
        named = request.api == "chat" and self._settings.version >= RENAMED_VERSION
        ids = text.token_ids(request.ident.digest, outcome.tokens, choice=choice)
        return f',"{"response_token_ids" if named else "token_ids"}":[{ids}]'

    def _thought(self, request: OpenRequest, outcome: Outcome) -> int:
        """Tokens of thinking: all of them when max_tokens cut the answer before it began."""
        return min(max(round(request.natural_tokens * _THINKING), 1), outcome.tokens)

    def _generate(self, request: OpenRequest, outcome: Outcome) -> str:
        plan = request.plan
        items = [self._item(request, outcome, choice) for choice in range(plan.choices)]
        return f"[{','.join(items)}]" if plan.batch else items[0]

    def _item(self, request: OpenRequest, outcome: Outcome, choice: int) -> str:
        rids = request.plan.rids
        rid = rids[choice] if choice < len(rids) else request.ident.rid
        latency = time.monotonic() - request.arrived_s
        ids = text.token_ids(request.ident.digest, outcome.tokens, choice=choice)
        now = time.time()
        span = f'{{"version":"default","start":0,"end":{outcome.tokens}}}'
        versions = f',"weight_versions":[{span}]' if self._new else ""
        return (
            f'{{"text":{self.content(request, outcome.tokens, choice)}'
            f',"output_ids":[{ids}]'
            f',"meta_info":{{"id":{quote(rid)},"finish_reason":{_finish_reason(outcome)}'
            f',"prompt_tokens":{request.plan.prompt_tokens},"weight_version":"default"'
            f',"num_retractions":{request.retractions},"reasoning_tokens":0'
            f',"completion_tokens":{outcome.tokens},"cached_tokens":0{versions}'
            f',"cached_tokens_details":null,"dp_rank":null,"e2e_latency":{latency}'
            f',"request_received_ts":{now - latency},"response_sent_to_client_ts":{now}}}'
            f"{_prompt_ids(request)}}}"
        )


def _prompt_ids(request: OpenRequest) -> str:
    plan = request.plan
    if not plan.prompt_ids:
        return ""
    ids = ",".join(map(str, plan.own_ids))
    ids = ids or text.token_ids(request.ident.digest[4:], plan.prompt_tokens)
    return f',"prompt_token_ids":[{ids}]'


def _finish_reason(outcome: Outcome) -> str:
    if outcome.reason == "stop":
        return f'{{"type":"stop","matched":{quote(outcome.matched)}}}'
    if outcome.reason == "length":
        return f'{{"type":"length","length":{outcome.tokens}}}'
    message = quote(outcome.message)
    return f'{{"type":"abort","message":{message},"status_code":null,"err_type":null}}'
