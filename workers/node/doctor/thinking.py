"""Find out whether a model thinks aloud, and which parser takes its thoughts out of its answers.

By the chat template among its files, where they lie here; else by its name. A model that thinks
and a server without a parser give answers that begin with thoughts.
"""

import re
from pathlib import Path

from workers.capacity.model_files import model_folder

MOST_TEMPLATE_BYTES = 1 << 20
SOME_PARSER = "NAME"
"""For a model that thinks in a form that is not known here."""

_TEMPLATES = ("chat_template.jinja", "tokenizer_config.json", "chat_template.json")

# A name's part -> SGLang's --reasoning-parser, the first that fits.
_BY_NAME: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), parser)
    for pattern, parser in (
        (r"deepseek[-_]?v3", "deepseek-v3"),
        (r"deepseek[-_]?r1|r1[-_]distill", "deepseek-r1"),
        (r"gpt[-_]?oss", "gpt-oss"),
        (r"glm[-_]?(4[-_.]?[5-9]|z1|[5-9])", "glm45"),
        (r"kimi[-_]?k2", "kimi_k2"),
        (r"minimax[-_]?m", "minimax"),
        (r"step[-_]?3", "step3"),
        (r"qwq|qwen[-_]?3|qwen[-_]?4", "qwen3"),
    )
)
_NEVER_THINKS = re.compile(r"instruct|coder|embedding|reranker|\bbase\b", re.IGNORECASE)
_ALWAYS_THINKS = re.compile(r"thinking|qwq|[-_]r1\b|reasoning", re.IGNORECASE)
_MARKS = ("<think>", "enable_thinking", "reasoning_content")


def parser_for(model: str, model_path: str | None) -> str | None:
    """Name the reasoning parser that a model needs; None where it does not think, as far as known.

    Args:
        model: Its served name.
        model_path: Where its files are, or its name at a hub.
    """
    names = [name for name in (_last(model_path), model) if name]
    template = _template(model_path) if model_path else None
    if template is not None and not any(mark in template for mark in _MARKS):
        return None
    for name in names:
        if _NEVER_THINKS.search(name) and not _ALWAYS_THINKS.search(name):
            return None
    for name in names:
        for pattern, parser in _BY_NAME:
            if pattern.search(name):
                return parser
    thinks = template is not None or any(_ALWAYS_THINKS.search(name) for name in names)
    return SOME_PARSER if thinks else None


def _last(path: str | None) -> str:
    return Path(path).name if path else ""


def _template(model_path: str) -> str | None:
    folder = model_folder(model_path)
    if folder is None:
        return None
    for name in _TEMPLATES:
        try:
            with (folder / name).open("rb") as file:
                text = file.read(MOST_TEMPLATE_BYTES).decode(errors="replace")
        except OSError:
            continue
        if name.endswith(".jinja") or "chat_template" in text:
            return text
    return None
