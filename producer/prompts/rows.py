"""Turn one line of input into a request, or say why it cannot be one. Pure; no I/O.

A row is one of: `prompt` (a user message, or with `raw_prompt` text to complete), `messages`,
`conversations`, `text` or `input_ids` (for /generate), or a line of an OpenAI batch file
(`custom_id`, `method`, `url`, `body`).
"""

from collections import Counter
from typing import Any, Literal

import msgspec

from common.ids import typed_id
from common.models import Endpoint
from producer.prompts.broken import NESTING_LIMIT, explain, is_too_deep
from producer.prompts.chat import (
    check_messages,
    from_conversation,
    is_blank,
    with_system,
    without_last_answer,
)
from producer.prompts.content import check_text, route_of
from producer.prompts.parameters import KNOWN, check_parameters, own_parameters
from producer.prompts.turns import all_turns, unfit
from producer.prompts.verdicts import MissingMaxTokensError, RowRejectedError

FORMS = ("prompt", "messages", "conversations", "text", "input_ids")
ACCEPTED = (
    "a row has one of prompt, messages, conversations, text, input_ids, or is an OpenAI batch "
    "line with custom_id and body"
)

MOST_UNSENT = 100
"""Names that are counted; the rows of some data sets have names by the thousand."""

_ENVELOPE = ("custom_id", "method", "url", "body")
_PLAIN_IDS = ("id", "custom_id")
_BATCH_IDS = ("custom_id", "id")
_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n\v\f"

_decode = msgspec.json.Decoder().decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class RowRules(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags say about reading rows.

    Attributes:
        id_field: The member that holds the id, instead of `id` and `custom_id`.
        raw_prompt: `prompt` is text to complete, not a user message.
        turns: "last" drops the answer at the end of `messages` too; "all" asks for every answer of
            `messages` and `conversations` anew (`producer.prompts.turns`).
        model: The run's model; a row that names another is rejected.
        max_tokens_given: The run has a limit, so that rows need none of their own.
        private_addresses: Rows may have servers fetch from private networks.
    """

    id_field: str | None = None
    raw_prompt: bool = False
    turns: Literal["last", "all"] | None = None
    model: str | None = None
    max_tokens_given: bool = False
    private_addresses: bool = False


class Row(msgspec.Struct, gc=False):
    """An accepted row.

    Attributes:
        id_json: The id as JSON text (`common.ids.typed_id`), None when the row has none.
        endpoint, body, extra, turns: As in `common.models.Prompt`.
    """

    id_json: bytes | None
    endpoint: Endpoint
    body: dict[str, Any]
    extra: dict[str, Any]
    turns: int = 0


class RowChecker:
    """Check line after line by one set of rules.

    Attributes:
        ids_found: Rows that had the member of `id_field`.
        answered: Rows of `messages` that end with an assistant turn and are sent as they are.
        unsent: Members of plain rows that are kept with the prompt and not sent, and in how many
            rows; at most MOST_UNSENT of them.
    """

    def __init__(self, rules: RowRules) -> None:
        self._rules = rules
        self._model = rules.model
        self._private = rules.private_addresses
        self._plain_ids = (rules.id_field,) if rules.id_field else _PLAIN_IDS
        self._batch_ids = (rules.id_field,) if rules.id_field else _BATCH_IDS
        self.ids_found = 0
        self.answered = 0
        self.unsent: Counter[str] = Counter()

    @property
    def model(self) -> str | None:
        """The run's model: as the rules say, else as the first row that names one."""
        return self._model

    @property
    def id_names(self) -> tuple[str, ...]:
        """Members that may hold a row's id, the first one first."""
        return self._plain_ids

    def check(self, line: bytes) -> Row:
        """Turn one line, without its line feed, into a request.

        Raises:
            RowRejectedError: With the decoded row, where there is one.
            MissingMaxTokensError: The row has no limit of tokens, and the run neither.
        """
        try:
            row = _decode(line)
        except (msgspec.DecodeError, RecursionError):
            row, line = self._decode_again(line)
        if type(row) is not dict:
            raise RowRejectedError(
                "not_object", f"is JSON but no object ({_json_kind(row)}): {ACCEPTED}"
            )
        # Counted first, since that is quick, and enough for nearly every row.
        if line.count(b"[") + line.count(b"{") > NESTING_LIMIT and is_too_deep(row):
            raise RowRejectedError("bad_json", "is nested too deeply", row=row)
        return self.check_object(row, line)

    def check_object(self, row: dict[str, Any], line: bytes | None = None) -> Row:
        """Turn a decoded row into a request.

        Args:
            row: Plain values of JSON.
            line: The text that it was decoded from, where there is one.

        Raises:
            RowRejectedError, MissingMaxTokensError: As `check`.
        """
        try:
            return self._build(row, line)
        except RowRejectedError as error:
            error.row = row
            raise

    def _decode_again(self, line: bytes) -> tuple[Any, bytes]:
        """Look again at a line that did not decode: it may be blank, or begin with a mark."""
        bare = line.removeprefix(_BOM)
        if not bare.strip(_BLANKS):
            raise RowRejectedError("blank", "is blank")
        if bare is not line:
            try:
                return _decode(bare), bare
            except (msgspec.DecodeError, RecursionError):
                pass
        raise explain(bare)

    def _build(self, row: dict[str, Any], line: bytes | None) -> Row:
        forms = [name for name in FORMS if row.get(name) is not None]
        if len(forms) != 1:
            if not forms and "body" in row:
                return self._build_batch(row, line)
            self._refuse_forms(row, forms)
        form = forms[0]
        id_json, id_name = self._id(row, line, names=self._plain_ids)
        endpoint, body = self._content(row, form)
        known = KNOWN[endpoint]
        extra: dict[str, Any] = {}
        if len(row) > 1 + (id_name is not None):
            body.update(own_parameters(row, endpoint))
            extra = {
                name: value
                for name, value in row.items()
                if name not in known and name not in (form, id_name)
            }
            if endpoint == "chat":
                body["messages"] = self._with_side_text(body["messages"], extra)
            if extra:
                self._note_unsent(extra)
        if endpoint == "chat" and form != "prompt":
            check_messages(body["messages"], private=self._private)
        self._check(body, endpoint)
        if endpoint == "chat" and self._rules.turns == "all":
            return Row(id_json, endpoint, body, extra, self._ask_for_all(body))
        return Row(id_json, endpoint, body, extra)

    def _ask_for_all(self, body: dict[str, Any]) -> int:
        """Put a null where each answer belongs; 0 for a conversation that takes only one."""
        if problem := unfit(body):
            raise RowRejectedError("turns", problem)
        asked, answers = all_turns(body["messages"])
        # With one answer it is the plain request for the last one, and the same prompt as that.
        body["messages"] = asked if answers > 1 else asked[:-1]
        return answers if answers > 1 else 0

    def _note_unsent(self, extra: dict[str, Any]) -> None:
        for name in extra:
            if name in self.unsent or len(self.unsent) < MOST_UNSENT:
                self.unsent[name] += 1

    def _refuse_forms(self, row: dict[str, Any], forms: list[str]) -> None:
        if forms:
            raise RowRejectedError(
                "ambiguous", f"has {' and '.join(forms)}, of which one is the prompt: {ACCEPTED}"
            )
        # null and absent are told apart from an empty list or text, which has a reason of its own.
        present = [name for name in FORMS if name in row]
        what = f"{present[0]} is null" if present else "has no prompt"
        raise RowRejectedError("no_prompt", f"{what}: {ACCEPTED}")

    def _content(self, row: dict[str, Any], form: str) -> tuple[Endpoint, dict[str, Any]]:
        value = row[form]
        if form == "prompt":
            return self._prompt(value)
        if form == "messages":
            return "chat", {"messages": self._messages(value)}
        if form == "conversations":
            return "chat", {"messages": from_conversation(value, whole=self._rules.turns == "all")}
        check_text(value, form)
        return "generate", {form: value}

    def _prompt(self, value: Any) -> tuple[Endpoint, dict[str, Any]]:
        if self._rules.raw_prompt:
            check_text(value, "prompt")
            return "completions", {"prompt": value}
        if type(value) is str:
            if not value or value.isspace():
                raise RowRejectedError("empty_prompt", "prompt is empty")
            return "chat", {"messages": [{"role": "user", "content": value}]}
        if type(value) is list and not value:
            raise RowRejectedError("empty_prompt", "prompt is empty")
        if type(value) is list and type(value[0]) is dict:
            messages = self._messages(value)
            check_messages(messages, private=self._private)
            return "chat", {"messages": messages}
        raise RowRejectedError("bad_type", "prompt is neither text nor a list of messages")

    def _messages(self, value: Any) -> Any:
        if type(value) is not list or not value or type(value[-1]) is not dict:
            return value
        if value[-1].get("role") != "assistant":
            return value
        if self._rules.turns != "last":
            self.answered += self._rules.turns is None
            return value
        check_messages(value, private=self._private)
        return without_last_answer(value)

    def _with_side_text(
        self, messages: list[dict[str, Any]], extra: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Send a `system` text that stands beside the turns; data sets keep it there."""
        system = extra.get("system")
        if type(system) is not str or is_blank(system) or type(messages) is not list:
            return messages
        del extra["system"]
        return with_system(messages, system)

    def _build_batch(self, row: dict[str, Any], line: bytes | None) -> Row:
        id_json, id_name = self._id(row, line, names=self._batch_ids)
        body = row["body"]
        if type(body) is not dict:
            raise RowRejectedError("bad_type", "body is no object")
        endpoint = route_of(row)
        if endpoint == "chat":
            if "messages" not in body:
                raise RowRejectedError("no_prompt", "body has no messages")
            check_messages(body["messages"], private=self._private)
        elif endpoint == "completions":
            check_text(body.get("prompt"), "prompt", several=True)
        else:
            form = "text" if body.get("text") is not None else "input_ids"
            check_text(body.get(form), form)
        self._check(body, endpoint)
        extra = {
            name: value for name, value in row.items() if name != id_name and name not in _ENVELOPE
        }
        return Row(id_json, endpoint, body, extra)

    def _check(self, body: dict[str, Any], endpoint: Endpoint) -> None:
        limited = check_parameters(body, endpoint, private=self._private)
        model = body.get("model")
        if model is not None and model != self._model:
            self._check_model(model)
        if not limited and not self._rules.max_tokens_given:
            raise MissingMaxTokensError

    def _check_model(self, model: Any) -> None:
        if type(model) is not str:
            raise RowRejectedError("bad_type", "model is no text")
        if self._model is None:
            # Without --model the first row that names one decides: a run has one model.
            self._model = model
            return
        raise RowRejectedError("model", f"names model {model!r}, but the run has {self._model!r}")

    def _id(
        self, row: dict[str, Any], line: bytes | None, *, names: tuple[str, ...]
    ) -> tuple[bytes | None, str | None]:
        for name in names:
            value = row.get(name)
            if value is not None:
                break
        else:
            return None, None
        self.ids_found += 1
        kind = type(value)
        if kind is str:
            return _encode(value), name
        if kind is int and value:
            return b"%d" % value, name
        if kind is int or kind is float:
            # 1.50, 1e0, -0: how it was written is part of the id.
            return typed_id(value, bytes(_decode_raw(line)[name]) if line else None), name
        raise RowRejectedError("bad_type", f"{name} is neither text nor a number")


def _json_kind(value: Any) -> str:
    kinds = {list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
