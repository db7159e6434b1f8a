"""Take out of text what nobody may read: passwords, keys, tokens, signatures of addresses.

The last guard of promise 8, where text leaves a process: its log, its last words, a failure row.
Whoever makes a text still leaves secrets out of it; what slips through comes from libraries (an
address in an exception) and from servers that repeat what they were sent.

Known by their form: user and password of an address, signed queries of S3, Authorization headers.
Known by their value: what `hide` was told, the addresses and keys of the environment.
"""

import re
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

LEAST_CHARS = 8
"""A shorter secret is not looked for by its value: it would be found in ordinary words."""

_KEYS = ("HEADRACE_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HEADRACE_NOTIFY")
_ADDRESSES = ("HEADRACE_REDIS", "RQ_REDIS_URL", "HEADRACE_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")

_FORMS = (
    # Greedy up to the last @: a password may hold one.
    (re.compile(r"(?<=://)[^/\s]*@"), "…@"),
    (
        re.compile(
            r"(?i)\b((?:x-amz-(?:signature|credential|security-token)|(?:aws)?accesskeyid"
            r"|signature|password|api[_-]?key|access[_-]token|session[_-]token"
            r"|secret[_-]access[_-]key)=)[^&\s'\"]+"
        ),
        r"\1…",
    ),
    (re.compile(r"(?i)(\bauthorization\b['\"]?\s*[:=,]\s*b?['\"]?)[^'\"\r\n]+"), r"\1…"),
    (re.compile(r"(?i)(\bbearer\s+)[\w.~+/=-]{6,}"), r"\1…"),
)

# Filled once at start, by whoever reads a secret; only ever grows.
_hidden: set[str] = set()


def hide(*secrets: str | None) -> None:
    """Keep these values out of every text from now on."""
    _hidden.update(secret for secret in secrets if secret and len(secret) >= LEAST_CHARS)


def hide_address(url: str | None) -> None:
    """Keep the password of an address out of every text, as it is written and as it is meant."""
    try:
        password = urlsplit(url or "").password
    except ValueError:
        return
    if password:
        hide(password, unquote(password))


def hide_environment(environment: Mapping[str, str]) -> None:
    """Keep out the secrets that variables hold."""
    hide(*map(environment.get, _KEYS))
    for name in _ADDRESSES:
        hide_address(environment.get(name))


def without_secrets(text: str) -> str:
    """Put `…` in the place of every secret."""
    # The longest first: one may be a part of another.
    for secret in sorted(_hidden, key=len, reverse=True):
        text = text.replace(secret, "…")
    for form, instead in _FORMS:
        text = form.sub(instead, text)
    return text
