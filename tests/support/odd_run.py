"""A finished run of prompts and answers as nasty as they come, each told by its id."""

from collections.abc import Sequence
from typing import Any

import msgspec
from typing_extensions import override

from common.ids import fingerprint_of, key_of
from common.models import Choice, Endpoint, Prompt
from common.store import ObjectStore
from tests.support.finished_run import RUN, FinishedRun

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"n": 1.50}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1.50}'}}


class Case(msgspec.Struct, kw_only=True):
    """One prompt and its answer; `id` is JSON text."""

    id: str
    question: Any = "why?"
    before: Sequence[dict[str, Any]] = ()
    choices: list[Choice]
    sample: int = 0
    tools: list[Any] | None = None
    endpoint: Endpoint = "chat"
    fails: bool = False


def said(content: str | None, index: int = 0, **more: Any) -> Choice:
    return Choice(index=index, content=content, finish_reason="stop", **more)


ODD = {
    "nul": "a\0b",
    "replaced": "a\ufffdb",
    "emoji": "😀",
    "separators": "a\u2028b\u2029c\x85d\x0be",
    "returns": "a\rb\r\nc\nd",
    "slashes/../up": 'quoted " \\ </script>',
    "long": "ä€" * 400_000,
}
"""Answers by id: each must come back as it is, whoever reads."""


def odd_cases() -> list[Case]:
    texts = [
        Case(id=msgspec.json.encode(name).decode(), choices=[said(text)])
        for name, text in ODD.items()
    ]
    return [
        *texts,
        Case(id='"1"', choices=[said("text one")]),
        Case(id="1", choices=[said("number one")]),
        Case(id="12345678901234567890123", choices=[said("huge")]),
        Case(id='"thought"', choices=[said("so", reasoning_content="hm")]),
        Case(id='"called"', choices=[said(None, tool_calls=[CALL])], tools=TOOLS),
        Case(
            id='"went on"',
            before=[
                {"role": "user", "content": "look"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "seen"},
            ],
            choices=[said("it is there")],
            tools=TOOLS,
        ),
        Case(id='"two"', choices=[said("first"), said("second", 1)]),
        Case(id='"again"', choices=[said("sample 0")]),
        Case(id='"again"', sample=1, choices=[said("sample 1")]),
    ]


class OddRun(FinishedRun):
    """A run of given cases."""

    def __init__(self, store: ObjectStore, cases: Sequence[Case] | None = None) -> None:
        self.cases = list(cases) if cases is not None else odd_cases()
        fails = [number for number, case in enumerate(self.cases) if case.fails]
        super().__init__(store, prompts=len(self.cases), batch=4, fails=fails)

    @override
    def body(self, number: int) -> dict[str, Any]:
        case = self.cases[number]
        if case.endpoint != "chat":
            return {"prompt" if case.endpoint == "completions" else "text": case.question}
        question = {"role": "user", "content": case.question}
        tools = {"tools": case.tools} if case.tools else {}
        return {"messages": [*case.before, question], **tools}

    @override
    def id_json(self, number: int) -> bytes:
        return self.cases[number].id.encode()

    @override
    def key(self, number: int) -> bytes:
        return key_of(RUN, self.id_json(number), self.cases[number].sample)

    @override
    def fingerprint(self, number: int) -> bytes:
        return fingerprint_of(self.cases[number].endpoint, self.body(number))

    @override
    def choices(self, number: int) -> list[Choice]:
        return self.cases[number].choices

    @override
    def prompt(self, number: int) -> bytes:
        case = self.cases[number]
        return msgspec.json.encode(
            Prompt(
                id=msgspec.Raw(case.id.encode()),
                line=number + 1,
                endpoint=case.endpoint,
                body=self.body(number),
                source="prompts.jsonl",
                sample=case.sample,
                extra={"tag": number},
            )
        )
