"""The plots of the benchmarks are what their tables say."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
README = (FOLDER / "README.md").read_text()


@pytest.fixture(scope="module")
def drawn() -> Callable[[str], dict[str, str]]:
    found: Callable[[str], dict[str, str]] = runpy.run_path(str(FOLDER / "plots.py"))["drawn"]
    return found


def test_the_plots_are_drawn_from_the_tables(drawn: Callable[[str], dict[str, str]]) -> None:
    """`make plots` draws them."""
    kept = {path.stem: path.read_text() for path in (FOLDER / "plots").iterdir()}
    assert kept == drawn(README)


def test_each_plot_is_shown_and_is_a_picture(drawn: Callable[[str], dict[str, str]]) -> None:
    for name, svg in drawn(README).items():
        assert f"](plots/{name}.svg)" in README
        assert {one.tag.rpartition("}")[2] for one in ElementTree.fromstring(svg).iter()} <= {
            "svg",
            "style",
            "text",
            "rect",
        }


def test_a_longer_bar_is_a_larger_figure(drawn: Callable[[str], dict[str, str]]) -> None:
    table = "| | live | replayed |\n|---|---:|---:|\n| a & b | 1,200 s | 300 s |\n| <c> | | 0.5 s |\n"
    svg = ElementTree.fromstring(drawn(table)["replay"])
    widths = [float(one.attrib["width"]) for one in svg.iter() if one.tag.endswith("rect")]
    assert widths[0] > widths[1] > widths[2], "and a cell without a figure has none"
    texts = [one.text for one in svg.iter() if one.tag.endswith("text")]
    assert {"a & b", "<c>", "1,200 s"} <= set(texts)
    assert drawn("| | other |\n|---|---|\n| a | 1 |\n") == {}
