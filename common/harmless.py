"""Make text of unknown origin fit for a terminal: nothing in it acts, and long text is cut. Pure.

A model's answer may hold what moves a cursor, sets a title, writes to the clipboard or turns the
direction of the text around. Each such character is shown as its number instead.
"""

import re

_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction
    "\u2028\u2029\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def harmless(text: str) -> str:
    """Write every character that a terminal would act on as its number: `\\x1b`, `\\u202e`."""
    # Line ends of another system are what they mean.
    return _ACTING.sub(_number, text.replace("\r\n", "\n"))


def one_line(text: str, most: int = 200) -> str:
    """Likewise, without line breaks, and cut at so many characters."""
    flat = harmless(" ".join(text[: 2 * most].split()))
    return flat if len(flat) <= most else f"{flat[:most]}…"


def tail_of(text: str, most: int) -> str:
    """Give the last `most` characters, harmless, and say how many stand before them."""
    if len(text) <= most:
        return harmless(text)
    return f"[… {len(text) - most:,} characters before]\n{harmless(text[len(text) - most :])}"


def ends_of(text: str, most: int) -> str:
    """Give the first and the last characters, `most` in all, and say how many stand between."""
    if len(text) <= most:
        return harmless(text)
    last = most // 3
    first, end = text[: most - last], text[len(text) - last :]
    left_out = f"[… {len(text) - most:,} characters …]"
    return f"{harmless(first)}\n{left_out}\n{harmless(end)}"


def _number(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"  # noqa: PLR2004 - one byte
