"""Shared code of the comparisons with other software: runs the measurements and saves tables, JSON files and plots.

The compared programs run alternately in several rounds. The table shows the median over all rounds.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Self
from xml.sax.saxutils import escape

import torch

from saccade.distribution import DISTRIBUTION
from saccade.pipeline.errors import ConfigError
from saccade.processors import usable_processors

RESULTS = Path(__file__).resolve().parent.parent / "results"
OURS = "Saccade"
_WIDTH, _LABEL, _BAR, _ROW = 720, 210, 400, 20
_COLORS = ("#1f77b4", "#c55a11", "#888", "#4b8b3b")

Measured = Mapping[str, float]
"""Measured values of one round, by quantity."""


@dataclass(slots=True, frozen=True)
class Comparison:
    """Results of a benchmark that compares several programs on one machine. Saccade is the first program.

    Attributes:
        name: name of the benchmark command, and of the saved files.
        title: title of the table and plot, which says what is compared.
        note: conditions of the measurement.
        date: day of the measurement, ISO 8601.
        machine: hardware and operating system.
        versions: version of each package.
        units: unit of each measured quantity.
        values: one value per round, by program and quantity.
    """

    name: str
    title: str
    note: str
    date: str
    machine: str
    versions: dict[str, str]
    units: dict[str, str]
    values: dict[str, dict[str, list[float]]]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a comparison from a JSON file that `save` wrote.

        Raises:
            ConfigError: if the file is not a saved comparison.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: cannot be read as the JSON file of a saved comparison: {error}") from None

    def median(self, side: str, figure: str) -> float:
        """Return a program's median value of a quantity over all rounds, or NaN if the quantity was not measured."""
        return statistics.median(self.values[side].get(figure) or [math.nan])

    def ratio(self, side: str, figure: str) -> float:
        """Return a program's value relative to Saccade's: the median of the ratios of all rounds."""
        ours, theirs = (self.values[one].get(figure, []) for one in (next(iter(self.values)), side))
        ratios = [other / own for own, other in zip(ours, theirs, strict=False) if own]
        return statistics.median(ratios or [math.nan])

    def as_json(self) -> str:
        """Return all fields of the comparison as a JSON object."""
        return json.dumps(asdict(self), indent=1)

    def as_text(self) -> str:
        """Return a text table of all values. Values of other programs are followed by their ratio to Saccade's."""
        ours, *others = self.values
        rows = [["", ours, *others]]
        for figure, unit in self.units.items():
            cells = [_cell(self.median(ours, figure))]
            for side in others:
                value, ratio = self.median(side, figure), self.ratio(side, figure)
                cells.append(_cell(value) + ("" if math.isnan(ratio) else f" ({ratio:.2f}×)"))
            rows.append([f"{figure}, {unit}", *cells])
        wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, wide, strict=True)).rstrip() for row in rows]
        rounds = max(len(values) for one in self.values.values() for values in one.values())
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        foot = f"{self.date}, {self.machine}; {versions}; {rounds} rounds, medians"
        return "\n".join([self.title, *lines, foot, self.note])

    def as_svg(self) -> str:
        """Return a bar chart as SVG, with one group of horizontal bars per quantity. Each group has its own scale."""
        parts, y = list[str](), 34
        for figure, unit in self.units.items():
            parts.append(f'<text x="10" y="{y + 13}" font-weight="bold">{escape(f"{figure}, {unit}")}</text>')
            y += _ROW
            known = {side: self.median(side, figure) for side in self.values}
            known = {side: value for side, value in known.items() if not math.isnan(value)}
            most = max(known.values(), default=0.0) or 1.0
            for side, value in known.items():
                color = _COLORS[list(self.values).index(side) % len(_COLORS)]
                width = max(1.0, _BAR * max(0.0, value) / most)
                parts.append(
                    f'<text x="{_LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(side)}</text>'
                    f'<rect x="{_LABEL}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 5}" fill="{color}"/>'
                    f'<text x="{_LABEL + width + 6:.1f}" y="{y + 13}">{_cell(value)}</text>'
                )
                y += _ROW
            y += 6
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}" '
            f'font-family="sans-serif" font-size="12"><title>{escape(self.title)}</title>'
            f'<rect width="{_WIDTH}" height="{y}" fill="#fff"/>'
            f'<text x="10" y="20" font-size="14">{escape(self.title)} ({self.date})</text>'
        )
        return "\n".join([head, *parts, "</svg>"]) + "\n"

    def save(self, folder: Path = RESULTS) -> list[Path]:
        """Write the comparison as NAME.json and NAME.svg, and return the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{self.name}.json", folder / f"{self.name}.svg"]
        paths[0].write_text(self.as_json() + "\n", encoding="utf-8")
        paths[1].write_text(self.as_svg(), encoding="utf-8")
        return paths


def in_rounds(
    comparison: Comparison, sides: Mapping[str, Callable[[], Measured]], rounds: int, *, warm_up: bool = True
) -> Comparison:
    """Measure all compared programs in several rounds, and return the comparison with the measured values.

    Args:
        comparison: comparison without values, as `begin` returns it.
        sides: function that measures a program once, by name of the program; Saccade is the first.
        rounds: number of rounds. Each program is measured once per round.
        warm_up: whether to run each program once before the first round, without measuring.
    """
    if warm_up:
        for run in sides.values():
            run()
    values: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    for number in range(rounds):
        order = list(sides.items())
        for side, run in order if number % 2 == 0 else reversed(order):
            for figure, value in run().items():
                values[side].setdefault(figure, []).append(float(value))
    return replace(comparison, values=values)


def begin(name: str, title: str, note: str, units: dict[str, str], packages: Sequence[str]) -> Comparison:
    """Return a new comparison without measured values. It states the current date, machine and package versions.

    Args:
        name: name of the benchmark command, and of the saved files.
        title: title of the table and plot, which says what is compared.
        note: conditions of the measurement.
        units: unit of each measured quantity.
        packages: names of the Python packages whose versions are stored.
    """
    versions = {package: metadata.version(package) for package in (DISTRIBUTION, "torch", *packages)}
    return Comparison(name, title, note, date.today().isoformat(), machine(), versions, units, {})


def machine() -> str:
    """Return a description of this machine: processor or GPU, usable CPUs, operating system and Python version."""
    gpu = f"{torch.cuda.get_device_name(0)}, " if torch.cuda.is_available() else ""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass  # another system
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{gpu}{usable_processors()} of {os.cpu_count()} CPUs ({cpu}), {system}"


def require(*modules: str, install: str) -> None:
    """Check that the packages of the compared software can be imported.

    Args:
        modules: names of the modules.
        install: arguments for `pip install`, for the message.

    Raises:
        ConfigError: if modules are missing. The message contains the install command.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this comparison needs {', '.join(missing)}: pip install {install}")


def require_gpu(what: str) -> None:
    """Check that this machine has a CUDA device.

    Args:
        what: name of the benchmark that needs the GPU, for the error message.

    Raises:
        ConfigError: if there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError(f"{what} needs a CUDA GPU; run it on a machine with a GPU")


def _cell(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:#.3g}" if abs(value) < 100 else f"{value:.0f}"
