"""The account of a round. Pure: what the servers saw, what was at risk, what the store holds."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tests.acceptance.test_main_job import answers_its_own_request
from workers.simulator.hashing import request_hash
from workers.simulator.log import Served

Row = Mapping[str, Any]


class Redone(msgspec.Struct, frozen=True):
    """Requests beyond one a prompt.

    Attributes:
        requests: How many.
        at_risk: How many the deaths of the round could cost at most.
        unexplained: Digests with more requests than deaths that they were at risk in, and by how
            many more.
    """

    requests: int
    at_risk: int
    unexplained: dict[str, int]


def digest_of(row: Row) -> str:
    """Hash the request that a completion row says it asked."""
    messages = row["messages"]
    return request_hash({**row["params"], "messages": messages[:-1], "stream": False})


def count_redone(
    served: Iterable[Served],
    risks: Sequence[tuple[frozenset[str], frozenset[str]]],
    digests: Mapping[str, str],
) -> Redone:
    """Count the requests beyond one a prompt, and find those that no death explains.

    Args:
        served: Every request for a prompt, of all servers.
        risks: For each death, keys (hex) and digests of what it put at risk.
        digests: Key (hex) -> digest of each prompt.
    """
    seen = Counter(each.digest for each in served)
    allowed: Counter[str] = Counter()
    for keys, hashes in risks:
        allowed.update({digests[key] for key in keys if key in digests} | hashes)
    again = {digest: count - 1 for digest, count in seen.items() if count > 1}
    return Redone(
        requests=sum(again.values()),
        at_risk=allowed.total(),
        unexplained={
            digest: count - allowed[digest]
            for digest, count in again.items()
            if count > allowed[digest]
        },
    )


def most_open(served: Iterable[Served], deaths: Mapping[str, float]) -> int:
    """Give the most requests that live processes had open at once at one server.

    Args:
        served: The requests of that server.
        deaths: Epoch of each killed process -> Unix time: from then on its requests are nobody's.
    """
    marks: list[tuple[float, int]] = []
    for each in served:
        died = deaths.get(each.rid.partition("-")[0], float("inf"))
        end = min(each.end if each.end is not None else float("inf"), died)
        if each.begin < end:
            marks += [(each.begin, 1), (end, -1)]
    open_now = most = 0
    # At one instant an end comes first: a slot that is free may be taken.
    for _, change in sorted(marks):
        open_now += change
        most = max(most, open_now)
    return most


def wrong_rows(rows: Sequence[Row], prompts: set[str]) -> list[str]:
    """Find prompts without a completion, with two, and answers of another prompt."""
    ids = Counter(str(row["id"]) for row in rows)
    keys = Counter(str(row["key"]) for row in rows)
    found = [f"id {each} has no completion" for each in sorted(prompts - ids.keys())]
    found += [f"id {each} was never asked for" for each in sorted(ids.keys() - prompts)]
    found += [f"key {key} has {count} completions" for key, count in keys.items() if count > 1]
    found += [
        f"id {row['id']} has the answer of another prompt"
        for row in rows
        if not answers_its_own_request(dict(row))
    ]
    return found
