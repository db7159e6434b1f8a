"""What a row may have a server open: nothing of its own machine or network."""

from typing import Any

import msgspec
import pytest

from producer.prompts.rows import Row, RowChecker, RowRules
from producer.prompts.verdicts import RowRejectedError

PRIVATE = [
    "http://localhost/a.png",
    "http://LOCALHOST./a.png",
    "http://a.localhost:8000/a.png",
    "http://127.0.0.1:30000/flush_cache",
    "http://127.1/a.png",
    "http://2130706433/a.png",
    "http://0x7f000001/a.png",
    "http://0177.0.0.1/a.png",
    "http://[::1]/a.png",
    "http://[::ffff:169.254.169.254]/latest/meta-data",
    "http://[64:ff9b::a9fe:a9fe]/latest/meta-data",
    "http://[fd00:ec2::254]/latest/meta-data",
    "http://169.254.169.254/latest/meta-data/iam/security-credentials",
    "http://metadata.google.internal/computeMetadata/v1/",
    "http://metadata/",
    "https://10.1.2.3/a.png",
    "https://192.168.0.1/a.png",
    "https://100.64.0.1/a.png",
    "http://0.0.0.0:6379/",
    "http://224.0.0.1/",
    "http://files.lan/a.png",
    "http://\uff11\uff12\uff17.0.0.1/a.png",
    "http://127\u30020\u30020\u30021/a.png",
]
UNREADABLE = [
    "http:///a.png",
    "http://[::1/a.png",
    "http://h.example.org:99999/a.png",
    "http://example.org\\@127.0.0.1/a.png",
    "http://%31%32%37.0.0.1/a.png",
    "http://me@example.org/a.png",
]
PUBLIC = [
    "https://example.org/a b.png?x=1#y",
    "http://93.184.216.34:8080/a.png",
    "https://[2606:4700::1111]/a.png",
    "https://m\u00fcnchen.example/a.png",
    "data:image/png;base64,AA==",
    "DATA:image/png;base64,AA==",
]


def checked(row: dict[str, Any], *, private: bool = False) -> Row:
    rules = RowRules(max_tokens_given=True, private_addresses=private)
    return RowChecker(rules).check(msgspec.json.encode(row))


def reason(row: dict[str, Any], *, private: bool = False) -> str:
    with pytest.raises(RowRejectedError) as caught:
        checked(row, private=private)
    return caught.value.reason


def forms(address: str) -> list[dict[str, Any]]:
    """Every way in which a row can name an address."""
    part = {"type": "image_url", "image_url": {"url": address}}
    bare = {"type": "video_url", "video_url": address}
    body = {"messages": [{"role": "user", "content": [part]}]}
    return [
        {"messages": [{"role": "user", "content": [part]}]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}, bare]}]},
        {"messages": [{"role": "system", "content": [bare]}, {"role": "user", "content": "x"}]},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"text": "x", "image_data": address},
        {"custom_id": "a", "url": "/generate", "body": {"text": "x", "image_data": [[address]]}},
        {"custom_id": "a", "url": "/generate", "body": {"text": "x", "audio_data": address}},
        {"body": {"text": "x", "video_data": [{"url": address}]}},
        {"custom_id": "a", "body": {"messages": body["messages"], "image_data": address}},
    ]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_is_sent_only_where_the_caller_lets_rows_name_them(address: str) -> None:
    for row in forms(address):
        assert reason(row) == "url_scheme", row
        checked(row, private=True)


@pytest.mark.parametrize("address", [*UNREADABLE, "file:///etc/hostname", "FILE:/etc/hostname"])
def test_what_is_no_address_of_the_net_is_never_sent(address: str) -> None:
    for row in forms(address):
        assert reason(row) == reason(row, private=True) == "url_scheme", row


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_and_the_bytes_themselves_are_sent(address: str) -> None:
    for row in forms(address):
        checked(row)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "etc/passwd", "../a", "~/.ssh/id", "a.mp4", "file:x"]
)
@pytest.mark.parametrize("name", ["image_data", "audio_data", "video_data"])
def test_no_path_passes_for_the_bytes_of_a_picture(name: str, path: str) -> None:
    assert reason({"body": {"text": "x", name: path}}) == "url_scheme"
    checked({"body": {"text": "x", name: "/9j/4AAQSkZJRgABAQ" * 8 + "=="}})


@pytest.mark.parametrize(
    "name",
    [
        "base_url",
        "api_base",
        "api_key",
        "bootstrap_host",
        "callback_url",
        "custom_logit_processor",
    ],
)
@pytest.mark.parametrize(
    "content", [{"text": "x"}, {"messages": [{"role": "user", "content": "x"}]}]
)
def test_no_row_sends_a_request_or_a_key_elsewhere_or_code_to_a_server(
    name: str, content: dict[str, Any]
) -> None:
    assert reason({"custom_id": "a", "body": {**content, name: "x"}}) == "url"
    # Beside a prompt it is a column of the data set: kept, and not sent.
    row = checked({"prompt": "x", name: "x"})
    assert (name in row.body, row.extra) == (False, {name: "x"})
