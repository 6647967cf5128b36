"""Charts are well-formed pictures that show what they were given."""

import re
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from proxy.demo.chart import HEIGHT, MAX_POINTS, WIDTH, distribution, lines, percent, strip

FLOATS = st.floats(0, 1e9)
POINTS = st.lists(st.tuples(FLOATS, FLOATS), max_size=30)


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    root = ElementTree.fromstring(svg)
    found = []
    for each in root.iter("polyline"):
        pairs = [pair.split(",") for pair in each.attrib["points"].split()]
        found.append([(float(x), float(y)) for x, y in pairs])
    return found


@given(st.lists(POINTS, min_size=1, max_size=3))
def test_every_point_lies_on_the_picture(series: list[list[tuple[float, float]]]) -> None:
    svg = lines(
        [(f"<{number}>", points) for number, points in enumerate(series)],
        x_label="a & b",
        y_label="c",
        y_text=percent,
    )
    drawn = polylines(svg)
    assert len(drawn) == len(series)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for line in drawn for x, y in line)


def test_more_is_higher_and_later_is_further_right() -> None:
    (line,) = polylines(lines([("a", [(0, 0), (1, 5), (2, 10)])], x_label="x", y_label="y", y_text=percent))
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    assert [y for _, y in line] == sorted((y for _, y in line), reverse=True)


def test_a_long_line_is_thinned_and_keeps_its_end() -> None:
    points = [(float(at), float(at)) for at in range(5000)]
    (line,) = polylines(lines([("a", points)], x_label="x", y_label="y", y_text=percent))
    (last,) = polylines(lines([("a", points[-1:])], x_label="x", y_label="y", y_text=percent))
    assert len(line) <= MAX_POINTS + 1
    assert line[-1] == last[-1]


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=40))
def test_a_distribution_never_falls(values: list[float]) -> None:
    (line,) = polylines(distribution([("a", values)], x_label="s", y_label="share"))
    assert [y for _, y in line] == sorted((y for _, y in line), reverse=True)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_a_strip_has_one_square_a_chunk(alive: int, dead: int, gone: int) -> None:
    svg = strip([("alive", alive), ("dead", dead), ("gone", gone)])
    ElementTree.fromstring(svg)
    for kind, number in (("alive", alive), ("dead", dead), ("gone", gone)):
        assert len(re.findall(f'class="chunk {kind}"', svg)) == number
