"""Pixels: places, radii, outlines, fillings, turns, covering, dividers and smaller sizes."""

import numpy as np
import pytest

from hf_sparsecoding.tasks.raven import CONFIGURATIONS, Entity
from hf_sparsecoding.tasks.raven.rendering import draw_picture, ink, render, render_all


CIRCLE, BLACK, WHITE, UPRIGHT = 5, 9, 0, 3
PLACES = {  # (row, column) of the slots of the last component
    "center": [(80, 80)],
    "left_right": [(80, 120)],
    "up_down": [(120, 80)],
    "grid_2x2": [(40, 40), (40, 120), (120, 40), (120, 120)],
    "grid_3x3": [(row, column) for row in (25, 80, 132) for column in (25, 80, 132)],
    "out_in_center": [(80, 80)],
    "out_in_grid": [(67, 67), (67, 92), (92, 67), (92, 92)],
}
RADII = {
    "center": [32, 40, 48, 56, 64, 72],
    "left_right": [16, 20, 24, 28, 32, 36],
    "up_down": [16, 20, 24, 28, 32, 36],
    "grid_2x2": [16, 20, 24, 28, 32, 36],
    "grid_3x3": [10, 13, 15, 18, 21, 23],
    "out_in_center": [10, 13, 15, 18, 21, 23],
    "out_in_grid": [None, None, 7, 8, 9, 10],
}


def draw(configuration: str, *entities: Entity) -> np.ndarray:
    """The last component alone."""
    empty = [()] * (len(CONFIGURATIONS[configuration].components) - 1)
    return np.asarray(render((*empty, entities), configuration))


def one(type_: int, size: int = 5, color: int = BLACK, angle: int = UPRIGHT, slot: int = 0) -> Entity:
    return Entity(slot, type_, size, color, angle)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_places_and_radii(configuration):
    background = draw(configuration)
    for slot, (row, column) in enumerate(PLACES[configuration]):
        for size, radius in enumerate(RADII[configuration]):
            if radius is None:
                continue
            rows, columns = np.nonzero(draw(configuration, one(CIRCLE, size, slot=slot)) != background)
            assert (rows.min(), rows.max()) == (row - radius, row + radius)
            assert (columns.min(), columns.max()) == (column - radius, column + radius)


def test_dividers():
    for configuration in CONFIGURATIONS:
        image = draw(configuration)
        assert image.shape == (160, 160)
        expected = np.full((160, 160), 255)
        if configuration == "left_right":
            expected[:, 80] = 0
        if configuration == "up_down":
            expected[80] = 0
        assert np.array_equal(image, expected)


def test_outline_and_filling():
    for color, grey in enumerate((255, 224, 196, 168, 140, 112, 84, 56, 28, 0)):
        line = draw("center", one(CIRCLE, color=color))[80]
        assert line[:12].tolist() == [255] * 8 + [0, 0] + [grey] * 2
        assert line[80] == grey
    square = draw("center", one(2, 0, color=4, angle=4))  # 45 degrees: sides along the axes, 22.6 from the middle
    assert square[80, 55:62].tolist() == square[55:62, 80].tolist()
    assert np.count_nonzero(square[80, 50:80] < 60) == 2
    assert square[80, 62] == 140


def test_shapes_have_their_corners():
    # Rows 80 - 72 and 80 + 72 hold the corners of an upright square; other shapes have one on top alone.
    for type_, at_the_bottom in ((1, False), (2, True), (3, False), (4, True)):
        image = draw("center", one(type_))
        assert image[8, 80] == 0
        assert (image[152, 80] == 0) == at_the_bottom
    areas = [np.count_nonzero(draw("center", one(type_)) == 0) for type_ in (1, 2, 3, 4, 5)]
    exact = [n / 2 * np.sin(2 * np.pi / n) * 72**2 for n in (3, 4, 5, 6)] + [np.pi * 72**2]
    np.testing.assert_allclose(areas, exact, rtol=0.02)


def test_turns():
    triangles = [draw("center", one(1, angle=angle)) for angle in range(8)]
    for angle, (row, column) in {3: (8, 80), 5: (80, 8), 7: (152, 80), 1: (80, 152)}.items():  # 0, 90, 180, -90
        assert triangles[angle][row, column] == 0
        assert sum(triangle[row, column] == 0 for triangle in triangles) == 1
        assert np.count_nonzero(triangles[angle]) == np.count_nonzero(triangles[3])
    slanted = triangles[4]  # 45 degrees counterclockwise: the corner points to the upper left, at 72 / sqrt 2 = 51
    assert slanted[80 - 49, 80 - 49] == 0
    assert slanted[80 - 53, 80 - 53] == 255
    assert len(np.unique(slanted)) > 10  # bilinear
    assert len({image.tobytes() for image in triangles}) == 8
    assert len({draw("center", one(CIRCLE, angle=angle)).tobytes() for angle in range(8)}) == 1


def test_later_entities_cover_earlier_ones():
    small_triangle = one(1, size=0, color=WHITE)  # as the outer shape its side runs 16 below the middle
    for color, seen in ((4, 140), (WHITE, 0)):
        panel = ((small_triangle,), (one(CIRCLE, color=color),))  # radius 23
        image = np.asarray(render(panel, "out_in_center"))
        assert image[80 + 16, 80] == seen
        assert image[80 + 23, 80] == 0
        assert image[80, 80] == (140 if color else 255)


def test_ink_is_averaged_over_boxes():
    panels = [((one(2, color=3, angle=2),),), ((one(4, color=7),),)]
    images = render_all(panels, "center")
    full = ink(images)
    assert full.dtype == np.float32
    np.testing.assert_allclose(full, 1 - images / 255, atol=1e-7)
    assert full.max() == 1
    for size in (80, 40, 32, 20):
        box = 160 // size
        small = ink(images, size)
        assert small.shape == (2, size, size)
        row, column = size // 2, size // 3
        corner = full[:, row * box : (row + 1) * box, column * box : (column + 1) * box]
        np.testing.assert_allclose(small[:, row, column], corner.mean(axis=(1, 2)), rtol=1e-5)
        np.testing.assert_allclose(small.mean(), full.mean(), rtol=1e-5)


def test_picture_layout():
    greys = np.arange(16) * 10
    images = np.tile(greys[:, None, None], (1, 160, 160)).astype(np.uint8)
    picture = np.asarray(draw_picture(images[:8], images[8:]))
    assert picture.shape == (872, 680)
    matrix = [picture[172 - 84, 172 + 168 * column] for column in range(3)]
    assert matrix == [0, 10, 20]
    assert [picture[620, 88 + 168 * column] for column in range(4)] == [80, 90, 100, 110]
    assert [picture[780, 88 + 168 * column] for column in range(4)] == [120, 130, 140, 150]
    assert {0, 255} <= set(np.unique(picture[344:504, 428:588]))  # the question mark
