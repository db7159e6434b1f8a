"""Tell which addresses of a row a server may be asked to open. Pure; no name is looked up.

An SGLang server opens what a row names: a file of its own machine, a page of its own network, the
address where a cloud keeps the credentials of its machines. Whoever wrote the prompts would read
it in the answers. So files are never sent, and of addresses those of the public net only, unless
the caller says that the rows may name others. A public name may still lead to a private address:
that takes a server without a way there (deploy/README.md).
"""

import ipaddress
import re
import socket
import unicodedata
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from producer.prompts.verdicts import RowRejectedError

MEDIA = ("image_data", "video_data", "audio_data")
"""Members of /generate that hold addresses, paths, or the bytes themselves as base64."""

ELSEWHERE = (
    "api_base", "api_key", "base_url", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "callback_url", "webhook_url",
)  # fmt: skip
"""Members of a request that would send it, what comes of it, or a key somewhere else."""

CODE = "custom_logit_processor"
"""Member that a server set up for it runs as code: a pickle."""

_FETCHED = ("http://", "https://")
_BASE64 = re.compile(r"[A-Za-z0-9+/=_\-\s]*")
_LONGEST_PATH_CHARS = 64
"""A shorter text with a slash in it is a path rather than the bytes of a picture."""

_NUMERIC = re.compile(r"(?i)[0-9][0-9a-fx.]*")
_PRIVATE_NAMES = (".localhost", ".local", ".internal", ".intranet", ".lan", ".home.arpa")
_CARRIERS = tuple(map(ipaddress.ip_network, ("64:ff9b::/32", "2002::/16", "2001::/32")))
"""Networks whose addresses stand for others."""


def check_address(address: Any, where: str, *, private: bool) -> None:
    """Check what a chat message has a server fetch.

    Args:
        address: What stands in the row.
        where: Names the place, for people.
        private: Addresses of private networks may be sent.

    Raises:
        RowRejectedError: It is no address that is sent.
    """
    if type(address) is not str:
        raise RowRejectedError("bad_type", f"{where} has an address that is no text")
    if address[:5].lower() == "data:":
        return
    if not address[:8].lower().startswith(_FETCHED):
        # A server would open a local path and describe a file of its own machine.
        raise RowRejectedError(
            "url_scheme",
            f"{where} has an address that is neither http(s): nor data: - local files "
            "are not sent",
        )
    why = _foreign(address)
    if why == "private" and not private:
        raise RowRejectedError(
            "url_scheme",
            f"{where} has an address of a private network: put what is there into the row as "
            "data:, or pass --private-addresses if whoever wrote the rows may have your servers "
            "ask there",
        )
    if why and why != "private":
        raise RowRejectedError("url_scheme", f"{where} has an address that {why}")


def check_elsewhere(body: dict[str, Any], *, private: bool) -> None:
    """Check the members of a request that could make a server open or run something.

    Raises:
        RowRejectedError: One does.
    """
    for name in ELSEWHERE:
        if body.get(name) is not None:
            raise RowRejectedError(
                "url", f"names {name}: requests go to the run's own servers, so leave it out"
            )
    if body.get(CODE) is not None:
        raise RowRejectedError("url", f"has {CODE}, which is code that a server would run")
    for name in MEDIA:
        for found in _texts(body.get(name)):
            _check_media(found, name, private=private)


def _check_media(found: str, name: str, *, private: bool) -> None:
    if "://" in found[:16] or found[:5].lower() == "data:":
        check_address(found, name, private=private)
        return
    path = "/" in found and len(found) < _LONGEST_PATH_CHARS
    if path or not _BASE64.fullmatch(found) or found[:5].lower() == "file:":
        raise RowRejectedError("url_scheme", f"{name} names a local file: not sent")


def _texts(value: Any) -> Iterator[str]:
    if type(value) is str:
        yield value
    elif type(value) is list:
        for each in value:
            yield from _texts(each)
    elif type(value) is dict:
        yield from _texts([*value.values()])


def _foreign(address: str) -> str:
    """Say why an http(s) address is not sent; `private` for one of a private network."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "cannot be read"
    if not host or "\\" in parts.netloc or "%" in host or any(c < " " for c in address):
        return "cannot be read"
    if "@" in parts.netloc:
        return "holds a user or a password, which would stand in every result"
    plain = unicodedata.normalize("NFKC", host).replace("\u3002", ".").rstrip(".").lower()
    found = _ip(plain)
    if found is not None:
        return "" if _is_public(found) else "private"
    public = "." in plain and not plain.endswith(_PRIVATE_NAMES)
    return "" if public else "private"


def _ip(host: str) -> "ipaddress.IPv4Address | ipaddress.IPv6Address | None":
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    if not _NUMERIC.fullmatch(host):
        return None
    try:
        # The old forms, which many resolvers still read: 127.1, 0x7f.1, 2130706433.
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def _is_public(found: "ipaddress.IPv4Address | ipaddress.IPv6Address") -> bool:
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return _is_public(found.ipv4_mapped)
        if any(found in carrier for carrier in _CARRIERS):
            return False
    return found.is_global and not found.is_multicast
