"""Colours and hatches of memory, and the sheet they are drawn on.

White is painted, not left out, so that a picture reads on a dark page. Colours differ in lightness
as well and some are hatched: they are told apart in grey print and by colour-blind eyes.
matplotlib is imported only when a sheet is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_paged.errors import ConfigurationError
from hf_paged.simulation.memory_strip import Segment, SlotState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

__all__ = [
    "INK",
    "LATECOMER",
    "LOOKS",
    "REFUSED",
    "WAITING",
    "Look",
    "bars",
    "legend",
    "require_matplotlib",
    "sheet",
]

INK = "#222222"


@dataclass(frozen=True)
class Look:
    """How one kind of slot is drawn."""

    label: str
    colour: str
    hatch: str | None = None

    def patch(self, hatched: bool = True) -> Patch:
        """Return its entry in a legend."""
        from matplotlib.patches import Patch

        return Patch(
            facecolor=self.colour,
            edgecolor=INK,
            hatch=self.hatch if hatched else None,
            lw=0.5,
            label=self.label,
        )


LOOKS = {
    SlotState.USED: Look("used", "#004C7F"),
    SlotState.SHARED: Look("shared", "#009E73", "...."),
    SlotState.RESERVED: Look("reserved, empty", "#F0A830", "////"),
    SlotState.CACHED: Look("cached prefix, gives way", "#C4C4C4", "\\\\\\\\"),
    SlotState.HOLE: Look("hole", "#FFFFFF"),
}
LATECOMER = Look("the latecomer", "#CC79A7", "||||")
REFUSED = Look("refused", "#D55E00", "xxxx")
WAITING = Look("waiting", "#777777")


def require_matplotlib() -> None:
    """Refuse a picture before anything is computed for it.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            "--plot needs matplotlib, which is not installed: pip install hf-paged[plots]"
        ) from error


@contextmanager
def sheet(path: Path, width: float, height: float) -> Iterator[Figure]:
    """Yield a white figure; write it at the end.

    Args:
        path: its suffix says the format.
        width: in inches.
        height: in inches.

    Raises:
        ConfigurationError: the path cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"hatch.linewidth": 0.5, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(width, height), dpi=150, facecolor="white", layout="constrained")
        yield figure
        try:
            figure.savefig(path, facecolor="white")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise ConfigurationError(f"--plot: {path} cannot be written: {reason}") from error


def legend(figure: Figure, looks: Iterable[Look], *, hatched: bool = True) -> None:
    """Put a legend below everything; its patches are hatched where the picture is."""
    handles = [look.patch(hatched) for look in looks]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        handleheight=1.2,
    )


def bars(axes: Axes, segments: Sequence[Segment], y: float, height: float, look: Look) -> None:
    """Draw segments as one row of bars from ``y`` to ``y + height``, x in slots."""
    axes.broken_barh(
        [(part.start, part.num_slots) for part in segments],
        (y, height),
        facecolor=look.colour,
        hatch=look.hatch,
        edgecolor=INK,
        linewidth=0.3,
    )
