"""What nobody may read goes out of every text, by its form and by its value."""

import io
import logging
from collections.abc import Iterator

import pytest

from common import connect, secrecy
from common.logs import LONGEST_LINE_BYTES, MOST_ALIKE, _Sparing, set_up_logs
from common.secrecy import hide, hide_environment, without_secrets

SECRET = "c4nary-S3cret/+%value"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrecy, "_hidden", set[str]())


@pytest.mark.parametrize(
    "text",
    [
        "cannot reach redis://{USER}@host:6379/0",
        "GET https://b.s3.test/k?X-Amz-Credential=AKIA&X-Amz-Signature=s3cr3t-pass&x=1",
        "https://b.s3.test/k?AWSAccessKeyId=AK&Signature=s3cr3t-pass",
        "x-amz-security-token=s3cr3t-pass",
        "{'Authorization': 'Bearer s3cr3t-pass'}",
        "authorization: Basic czNjcjN0LXBhc3M=:s3cr3t-pass",
        "invalid key Bearer s3cr3t-pass given",
        "redis://host/0?password=s3cr3t-pass&ssl=1",
        "api_key=s3cr3t-pass",
        "ServerArgs(api_key='x', b=1) at http://{USER}@h/v1",
    ],
)
def test_a_secret_of_a_known_form_is_not_shown(text: str) -> None:
    shown = without_secrets(text.replace("{USER}", "user:s3cr@t-pass"))

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
        "HEADRACE_REDIS": "redis://" + f"me:{quoted}" + "@h/0",
    })  # fmt: skip
    hide("short", None)
    connect.client_for("redis://" + ":of-the-fl4g" + "@127.0.0.1:1/0")

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
    log.error("failed", exc_info=ValueError("x" * 10_000 + f" at redis://{SECRET}@h\x1b[31m"))

    said = logs.readouterr().err
    assert SECRET not in said
    assert "\x1b" not in said
    lines = said.splitlines()
    assert not any(line.startswith("2026-01-01 ERROR") for line in lines)
    assert max(len(line.encode()) for line in lines) < LONGEST_LINE_BYTES + 100 < 4096
    assert sum(line.startswith("ValueError: xxx") for line in lines) == 1


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def logger_of(handler: logging.Handler) -> logging.Logger:
    """A logger of its own, which passes nothing on."""
    log = logging.getLogger(f"test.{id(handler)}")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    return log


def test_what_repeats_is_counted_once_a_minute_whoever_says_it() -> None:
    written, clock = io.StringIO(), Clock()
    handler = _Sparing(written, clock=clock)
    log = logger_of(handler)

    for number in range(10_000):
        log.warning("server %s is down", f"http://h:{number}")
        log.error("%s", f"partition {number} was refused")
        clock.now_s += 0.001
    log.info("another fact")
    lines = written.getvalue().splitlines()
    assert len(lines) == 2 * MOST_ALIKE + 1

    clock.now_s += 60
    log.info("another fact")
    log.warning("server %s is down", "http://h")

    lines = written.getvalue().splitlines()[2 * MOST_ALIKE + 1 :]
    assert lines == [
        "9,970 more lines like this within a minute: server %s is down",
        "9,970 more lines like this within a minute: partition 0 was refused",
        "another fact",
        "server http://h is down",
    ]


def test_what_was_counted_last_is_said_at_the_end() -> None:
    written = io.StringIO()
    handler = _Sparing(written)
    log = logger_of(handler)

    for _ in range(MOST_ALIKE + 5):
        log.warning("again")
    handler.close()

    assert written.getvalue().splitlines()[-1] == "5 more lines like this within a minute: again"
