"""Distributions of answer lengths and latencies, drawn from a request's hash.

0.05, fixed:0.05      always this
exp:MEAN              exponential
lognormal:MEAN:SIGMA  log-normal with this mean; sigma is that of the logarithm
max                   as much as the request allows (lengths only)
"""

import math
import statistics
from typing import Literal

import msgspec

from workers.simulator.hashing import share

_standard = statistics.NormalDist()
_FIELDS = ("kind", "mean", "sigma")
_ARITY = {"fixed": 1, "exp": 1, "lognormal": 2, "max": 0}


class Distribution(msgspec.Struct, frozen=True):
    """A distribution over numbers >= 0.

    Attributes:
        kind: Which family.
        mean: Its mean, in the unit of what is drawn (tokens, seconds).
        sigma: Standard deviation of the logarithm; only of the log-normal.
    """

    kind: Literal["fixed", "exp", "lognormal", "max"]
    mean: float = 0.0
    sigma: float = 0.0

    def quantile(self, portion: float) -> float:
        """Give the value below which `portion` (in (0, 1)) of all draws lie.

        Returns:
            A number >= 0; infinity for `max`.
        """
        if self.kind == "fixed":
            return self.mean
        if self.kind == "exp":
            return -self.mean * math.log1p(-portion)
        if self.kind == "max":
            return math.inf
        middle = math.log(self.mean) - self.sigma**2 / 2
        return math.exp(middle + self.sigma * _standard.inv_cdf(portion))

    def draw(self, digest: str, salt: int) -> float:
        """Draw the number that belongs to a request; see `hashing.share`."""
        return self.mean if self.kind == "fixed" else self.quantile(share(digest, salt))


def parse_distribution(text: str) -> Distribution:
    """Read a distribution as the command line writes it (see the module).

    Raises:
        ValueError: If it is none of the forms, or a number is out of range.
    """
    kind, *numbers = text.split(":")
    if kind not in _ARITY:
        kind, numbers = "fixed", [text]
    if len(numbers) != _ARITY[kind]:
        raise ValueError(f"{text!r}: {kind} takes {_ARITY[kind]} number(s) after a colon")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        forms = "N, fixed:N, exp:MEAN, lognormal:MEAN:SIGMA or max"
        raise ValueError(f"{text!r} is not a distribution; write {forms}") from None
    if any(value < 0 or not math.isfinite(value) for value in values):
        raise ValueError(f"{text!r}: the numbers must be finite and not negative")
    if kind == "lognormal" and values[0] == 0:
        raise ValueError(f"{text!r}: the mean of a log-normal must be above 0")
    return msgspec.convert(dict(zip(_FIELDS, [kind, *values], strict=False)), Distribution)
