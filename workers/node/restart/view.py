"""Show how far a restart is: a line a server on a terminal, a line a step elsewhere."""

import threading
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.harmless import one_line
from common.last_words import tell
from workers.node.restart.choice import Outcome

_STYLES = {
    "done": "green",
    "has it already": "green",
    "failed": "bold red",
    "interrupted": "yellow",
    "waiting": "dim",
}


class View:
    """What people see; steps say from their own threads where they are.

    Args:
        names: Of the servers, in their order.
        screen: A terminal gets a table that moves.
    """

    def __init__(self, names: Sequence[str], screen: Console) -> None:
        self._lock = threading.Lock()
        # Name -> step, what there is to say of it, and since when it is at that step.
        self._rows = {name: ("waiting", "", time.monotonic()) for name in names}
        self.live = Live(console=screen, auto_refresh=False) if screen.is_terminal else None

    def say(self, name: str, step: str, detail: str) -> None:
        """Take note of where a server is; an empty step is the one it is at."""
        with self._lock:
            was, _, since_s = self._rows[name]
            step = step or was
            changed = step != was
            self._rows[name] = (step, detail, time.monotonic() if changed else since_s)
        if changed and self.live is None:
            tell(f"{name}: {step}{f': {detail}' if detail else ''}")

    def show(self) -> None:
        """Draw it."""
        if self.live is not None:
            self.live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for heading in ("server", "step", "for", ""):
            table.add_column(heading, header_style="dim", no_wrap=True, overflow="ellipsis")
        with self._lock:
            rows = dict(self._rows)
        for name, (step, detail, since_s) in rows.items():
            since = "" if step == "waiting" else f"{time.monotonic() - since_s:.0f} s"
            table.add_row(
                Text(one_line(name)),
                Text(step, style=_STYLES.get(step, "cyan")),
                since,
                Text(one_line(detail)),
            )
        return table


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Say what became of all, a line each; what went wrong last."""
    lines = []
    for each in outcomes:
        if each.state == "restarted" and each.before and each.after:
            times = [
                f"{word} {value:.0f} s"
                for word, value in (("empty after", each.drained_s), ("back after", each.away_s))
                if value is not None
            ]
            spent = f" ({', '.join(times)})" if times else ""
            lines.append(f"{each.name}: {each.before.text} -> {each.after.text}{spent}")
    skipped = [each.name for each in outcomes if each.state == "skipped"]
    if skipped:
        lines.append(f"had it already: {', '.join(skipped)} (--force restarts them too)")
    left = [each.name for each in outcomes if each.state == "not begun"]
    if left:
        lines.append(f"left as they are: {', '.join(left)}")
    lines += [each.detail for each in outcomes if each.state in {"failed", "stopped"}]
    return lines
