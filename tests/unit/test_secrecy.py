"""What nobody may read goes out of every text, by its form and by its value."""

import logging
from collections.abc import Iterator

import pytest

from common import connect, secrecy
from common.logs import LONGEST_LINE_BYTES, set_up_logs
from common.secrecy import hide, hide_environment, without_secrets

SECRET = "c4nary-S3cret/+%value"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrecy, "_hidden", set[str]())


@pytest.mark.parametrize(
    "text",
    [
        "cannot reach redis://user:s3cr@t-pass@host:6379/0",
        "GET https://b.s3.test/k?X-Amz-Credential=AKIA&X-Amz-Signature=s3cr3t-pass&x=1",
        "https://b.s3.test/k?AWSAccessKeyId=AK&Signature=s3cr3t-pass",
        "x-amz-security-token=s3cr3t-pass",
        "{'Authorization': 'Bearer s3cr3t-pass'}",
        "authorization: Basic czNjcjN0LXBhc3M=:s3cr3t-pass",
        "invalid key Bearer s3cr3t-pass given",
        "redis://host/0?password=s3cr3t-pass&ssl=1",
        "api_key=s3cr3t-pass",
        "ServerArgs(api_key='x', b=1) at http://u:s3cr3t-pass@h/v1",
    ],
)
def test_a_secret_of_a_known_form_is_not_shown(text: str) -> None:
    shown = without_secrets(text)

    assert "t-pass" not in shown
    assert "…" in shown


@pytest.mark.parametrize(
    "text",
    [
        "server http://127.0.0.1:30000: worker group gpu0@host has 2 of 3",
        "stored s3://bucket/prefix/shards/00-00000001-ab.jsonl.zst: 3 rows",
        "token usage 0.5, max_tokens=64, the password is wrong, bearer of news",
        "mail me@example.org",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert without_secrets(text) == text


def test_a_secret_is_known_by_its_value_wherever_it_comes_from() -> None:
    quoted = "c4nary-S3cret%2F%2B%25value"
    hide_environment({
        "HEADRACE_API_KEY": "k3y-of-the-server",
        "AWS_SESSION_TOKEN": "t0ken-of-a-session",
        "HEADRACE_REDIS": f"redis://me:{quoted}@h/0",
    })  # fmt: skip
    hide("short", None)
    connect.client_for("redis://:of-the-fl4g@127.0.0.1:1/0")

    said = f"k3y-of-the-server t0ken-of-a-session {SECRET} {quoted} of-the-fl4g short"

    assert without_secrets(said) == "… … … … … short"


@pytest.fixture
def logs(capsys: pytest.CaptureFixture[str]) -> Iterator[pytest.CaptureFixture[str]]:
    root = logging.getLogger()
    kept, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    yield capsys
    root.handlers[:] = kept
    root.setLevel(level)
    logging.raiseExceptions = raises
    for name in ("common", "producer", "workers", "headrace"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_a_fact_is_one_short_line_that_no_terminal_acts_on(
    logs: pytest.CaptureFixture[str],
) -> None:
    hide(SECRET)
    set_up_logs("DEBUG")
    log = logging.getLogger("workers.any")

    log.warning("said: %s", "🙂\x1b[2J\n2026-01-01 ERROR forged " + SECRET + "漢" * 10_000)
    log.error("failed", exc_info=ValueError("x" * 10_000 + f" at redis://u:{SECRET}@h\x1b[31m"))

    said = logs.readouterr().err
    assert SECRET not in said
    assert "\x1b" not in said
    lines = said.splitlines()
    assert not any(line.startswith("2026-01-01 ERROR") for line in lines)
    assert max(len(line.encode()) for line in lines) < LONGEST_LINE_BYTES + 100 < 4096
    assert sum(line.startswith("ValueError: xxx") for line in lines) == 1
