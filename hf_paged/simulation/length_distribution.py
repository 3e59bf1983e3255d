"""Where random lengths come from: ``normal:220:160``, ``uniform:32:512``, ..."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from hf_paged.errors import ConfigurationError

__all__ = ["LengthDistribution"]

_PARAMETERS = {
    "fixed": ("LENGTH",),
    "uniform": ("LOWEST", "HIGHEST"),
    "normal": ("MEAN", "DEVIATION"),
    "lognormal": ("MEDIAN", "SIGMA"),
}


@dataclass(frozen=True)
class LengthDistribution:
    """Lengths in tokens, rounded down and clipped to a range.

    Attributes:
        kind: ``fixed``, ``uniform``, ``normal`` or ``lognormal``.
        parameters: in tokens; the sigma of a lognormal has no unit.
        shortest: lengths below become this.
        longest: lengths above become this.
    """

    kind: str
    parameters: tuple[float, ...]
    shortest: int = 1
    longest: int | None = None

    @classmethod
    def parse(cls, text: str, argument: str) -> LengthDistribution:
        """Read ``KIND:PARAMETERS``, and perhaps ``:SHORTEST:LONGEST`` behind it.

        >>> LengthDistribution.parse("normal:220:160:32:1024", "--prompts").longest
        1024

        Args:
            text: what the user wrote.
            argument: where; named by the error.

        Raises:
            ConfigurationError: it is no distribution.
        """
        kind, *fields = text.split(":")
        names = _PARAMETERS.get(kind)
        if names is None:
            raise ConfigurationError(
                f"{argument}: {text!r} is no distribution; expected one of {_forms()}, "
                "each with :SHORTEST:LONGEST behind it if you like"
            )
        form = ":".join((kind, *names))
        try:
            numbers = [float(field) for field in fields]
        except ValueError:
            numbers = []
        if len(numbers) not in (len(names), len(names) + 2) or not all(map(math.isfinite, numbers)):
            raise ConfigurationError(
                f"{argument}: {text!r} does not read as {form} or {form}:SHORTEST:LONGEST, in "
                "numbers"
            )
        parameters = tuple(numbers[: len(names)])
        bounds = [int(number) for number in numbers[len(names) :]]
        if min(parameters) < 0 or (kind == "uniform" and parameters[0] > parameters[1]):
            raise ConfigurationError(f"{argument}: {text!r} has no such lengths ({form})")
        if kind in ("fixed", "uniform", "lognormal") and parameters[0] < 1:
            raise ConfigurationError(f"{argument}: {text!r}: a length is at least 1 token")
        if bounds and not 1 <= bounds[0] <= bounds[1]:
            raise ConfigurationError(
                f"{argument}: {text!r}: expected 1 <= SHORTEST <= LONGEST, got {bounds[0]} and "
                f"{bounds[1]}"
            )
        return cls(kind, parameters, *bounds)

    def sample(self, generator: random.Random) -> int:
        """Draw one length, in tokens."""
        first, second = (*self.parameters, 0.0)[:2]
        if self.kind == "fixed":
            length = first
        elif self.kind == "uniform":
            length = generator.randint(int(first), int(second))
        elif self.kind == "normal":
            length = generator.gauss(first, second)
        else:
            length = first * math.exp(min(second * generator.gauss(0.0, 1.0), 40.0))
        clipped = max(self.shortest, int(length))
        return clipped if self.longest is None else min(clipped, self.longest)


def _forms() -> str:
    return ", ".join(":".join((kind, *names)) for kind, names in _PARAMETERS.items())
