"""Decide when a server that ended is launched again, and when that would only repeat it. Pure."""

import msgspec

from workers.supervisor.last_words import LastWords

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
STABLE_S = 60.0
"""A server that gave tokens for so long starts anew without any delay that came before."""

MOST_SAME = 3
"""Starts in a row without a token that end in the same words: another one would too."""


class Verdict(msgspec.Struct, frozen=True):
    """What follows an end.

    Attributes:
        wait_s: Until the next start; None where there shall be none.
        text: Why, for people.
    """

    wait_s: float | None
    text: str


class Restarts:
    """The ends of one launch line; another line gets one of its own.

    Attributes:
        proven: It has given a token once, so that it can run.
        count: Ends so far.
    """

    def __init__(self) -> None:
        self.proven = False
        self.count = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._same = 0
        self._text = ""

    def ready(self) -> None:
        """Take note that it gave a token."""
        self.proven = True

    def ended(self, words: LastWords, *, ready_s: float | None) -> Verdict:
        """Say what to do after an end that nobody asked for.

        Args:
            words: Why it ended.
            ready_s: For how long it had given tokens; None when it never did.
        """
        self.count += 1
        self._same = self._same + 1 if ready_s is None and words.text == self._text else 1
        self._text = words.text
        if not self.proven and (words.repeats or self._same >= MOST_SAME):
            times = f", {self._same} times in a row" if self._same > 1 else ""
            return Verdict(None, f"it does not start{times}: {words.text}")
        if ready_s is not None and ready_s >= STABLE_S:
            self._backoff_s = FIRST_BACKOFF_S
        wait_s = self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, LONGEST_BACKOFF_S)
        return Verdict(wait_s, words.text)
