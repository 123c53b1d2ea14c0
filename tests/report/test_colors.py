"""The colours of a report: seen on both papers, and told apart by those who see fewer."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import swaptrain
from swaptrain.report.lanes import BACKWARD, COMMITS, FORWARD, READS, UPDATE, WAITING, WRITES

STYLE = Path(swaptrain.__file__).parent / "report" / "assets" / "style.css"
BESIDE = {
    "two runs": (1, 2),
    "time": (1, 3, 2, 5, 7),
    "computing": (FORWARD, BACKWARD, UPDATE, COMMITS),
    "lanes": (BACKWARD, WAITING, READS, WRITES, COMMITS),
    "hits": (3, 5),
    "memory": (1, 3, 2, 5, 6, 7, 4, 9),
}
"""Numbers of colours that are in one chart, in the order in which they touch."""
# Machado, Oliveira and Fernandes (2009): what a person without one kind of cone sees, linear RGB.
SEEN = {
    "all": np.eye(3),
    "protanopia": np.array([
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]),
    "deuteranopia": np.array([
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]),
    "tritanopia": np.array([
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ]),
}  # fmt: skip
TO_XYZ = np.array([
    [0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505],
])  # fmt: skip


def palette(dark: bool) -> dict[str, str]:
    """Return the colours of a theme by name."""
    light_text, dark_text, *_ = re.findall(r":root \{(.*?)\}", STYLE.read_text(), re.DOTALL)
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light_text))
    return found | (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark_text)) if dark else {})


def linear(color: str) -> np.ndarray:
    """Return the linear RGB of `#rrggbb`."""
    parts = np.array([int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours, as WCAG 2 defines it."""
    light = sorted(float(TO_XYZ[1] @ linear(color)) + 0.05 for color in (first, second))
    return light[1] / light[0]


def lab(rgb: np.ndarray) -> np.ndarray:
    """Return CIE Lab of linear RGB."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("dark", [False, True])
def test_colours_stand_out_from_the_paper(dark: bool) -> None:
    """Text by 4.5, what is drawn by 3 (WCAG 2 AA); 2.7 for the light one of a pair that touches."""
    colors = palette(dark)
    for name in ("ink", "muted", "link"):
        assert contrast(colors[name], colors["paper"]) >= 4.5, name
    assert contrast(colors["warn-ink"], colors["warn"]) >= 4.5
    assert contrast(colors["ink"], colors["panel"]) >= 4.5
    for number in range(1, 10):
        least = 2.7 if number == FORWARD else 3
        assert contrast(colors[f"c{number}"], colors["paper"]) >= least, number


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("chart", BESIDE)
def test_colours_of_a_chart_are_told_apart(chart: str, seen: str, dark: bool) -> None:
    """By a distance of 10 in Lab, whichever cones are missing; just noticeable are about 2.3."""
    colors = palette(dark)
    points = {k: lab(SEEN[seen] @ linear(colors[f"c{k}"])) for k in BESIDE[chart]}
    for first, second in combinations(points, 2):
        distance = float(np.linalg.norm(points[first] - points[second]))
        assert distance >= 10, (first, second, distance)
