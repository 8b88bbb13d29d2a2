"""Heat maps: half blocks in colour, shades without, nothing in a pipe, and never wider than the room."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from locater.errors import Refusal
from locater.report.terminal import SHADES, HeatMap

pytestmark = pytest.mark.quick


def drawn(shown, **options):
    stream = io.StringIO()
    console = Console(
        file=stream, **(dict(width=80, force_terminal=True, color_system="256", legacy_windows=False) | options)
    )
    console.print(shown)
    return stream.getvalue()


def heat(layers, heads, diverging=False):
    cells = [[float(layer * heads + head) for head in range(heads)] for layer in range(layers)]
    return HeatMap("ξ", [str(layer) for layer in range(layers)], cells, diverging)


def test_two_layers_share_a_line_and_each_keeps_its_colour():
    lines = drawn(heat(6, 4)).splitlines()
    assert sum("▀" in line for line in lines) == 3 and "\x1b[38;5;" in lines[2] and "48;5;" in lines[2]
    assert lines[2] != lines[3]


def test_heads_and_layers_are_numbered_and_a_block_is_explained():
    lines = Text.from_ansi(drawn(heat(5, 9))).plain.splitlines()
    assert lines[1].split() == [str(head) for head in range(9)]
    assert [line.split()[0] for line in lines[2:5]] == ["0-1", "2-3", "4"]
    assert lines[-1].strip() == "half a block, 2 wide, is a head of a layer"
    merged = drawn(heat(300, 500), no_color=True).splitlines()
    assert "is the mean of 8 heads in 5 layers" in " ".join(" ".join(merged).split())


def test_shades_without_colour_rise_with_the_value():
    lines = drawn(heat(9, 1), no_color=True).splitlines()
    assert "38;5" not in "".join(lines)
    assert [line.split()[1][0] for line in lines[2:11]] == list(SHADES)


def test_nothing_in_a_pipe():
    assert drawn(heat(6, 4), force_terminal=False).strip() == ""


@pytest.mark.parametrize("plain", [True, False], ids=["NO_COLOR", "colour"])
@pytest.mark.parametrize("size", [(1, 1), (3, 500), (300, 12), (128, 128)])
def test_fits_any_terminal(size, plain):
    for width in (30, 80):
        text = drawn(heat(*size), width=width, no_color=plain)
        lines = Text.from_ansi(text).plain.splitlines()
        assert all(cell_len(line) <= width for line in lines) and len(lines) <= 71
        assert ("▀" in text) == (not plain)


def test_a_head_that_is_missing_is_blank():
    found = HeatMap("x", ["0"], [[0.0, None, 1.0]])
    assert drawn(found, no_color=True).splitlines()[2] == f"   0 {SHADES[0] * 2}  {SHADES[-1] * 2}"


def test_a_spoiled_number_of_a_head_is_refused_before_a_map_is_made():
    heads = [{"layer": 0, "head": head, "entropy": 0.5} for head in (0, 10**9)]
    with pytest.raises(Refusal, match="numbers of heads below 65,536"):
        HeatMap.of_heads(heads, "entropy", whose="run", span=(0.0, 1.0))
