"""Give a completion's token ids as lines of `input_ids` and `loss_mask`. Pure."""

from typing import Any

from producer.formats.base import ExportedRow
from producer.formats.conversation import line_id

NO_TOKENS = "have no generated tokens"


def token_lines(row: ExportedRow) -> list[dict[str, Any]] | None:
    """Give a line for each choice and each earlier turn; None where one lacks its token ids.

    Of several turns each has the ids of its own prompt and answer, the last one in the choice.
    What generated no token has no line: it teaches nothing, and the trainers drop it.
    """
    earlier = row.turns[:-1]
    sources = [(f"{line_id(row, 0)}-turn{at}", turn) for at, turn in enumerate(earlier)]
    sources += [(line_id(row, at), choice) for at, choice in enumerate(row.choices)]
    lines = []
    for name, source in sources:
        ids, mask = source.get("token_ids"), source.get("loss_mask")
        if ids is None or mask is None or len(ids) != len(mask):
            return None
        if any(mask):
            lines.append({"id": name, "input_ids": ids, "loss_mask": mask})
    return lines if sources else None
