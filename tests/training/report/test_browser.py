"""The report in a real browser: what its charts show, and that nothing fails or is fetched."""

import itertools
import math
import re

import numpy as np
import pytest

from tests.training.browser import PROGRAM, browser
from tests.training.report.saved_run import EVIL, TESTS, save, save_evil, save_pictures
from training.report.page import write_report

TIP = "document.getElementById('tip').innerText.split(/\\s+/).join(' ')"
CHART = ".chart > svg"
LEGEND = ".chart .legend button"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """One browser for all tests of this file."""
    if PROGRAM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def box(page, selector):
    """Scroll to an element and return its left, top, width and height."""
    return page.js(
        "(e => { e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
        f"return [b.x, b.y, b.width, b.height]; }})(document.querySelector({selector!r}))"
    )


def show(page, path, **options):
    """Open a report and wait until its charts are drawn."""
    page.open(path, **options)
    page.js("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")


def click(page, selector):
    left, top, width, height = box(page, selector)
    page.click(left + width / 2, top + height / 2)


def press(page, key):
    page.ask("Input.dispatchKeyEvent", type="keyDown", key=key)


def drag(page, start, end):
    """Drag the mouse from a place to another."""
    for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
        page.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def curves(page):
    """[(style, points)] of the lines in the first chart; a point is (M or L, x, y)."""
    paths = page.js(
        f"[...document.querySelector({CHART!r}).querySelectorAll('.curve')]"
        ".map(path => [path.classList[1], path.getAttribute('d')])"
    )
    found = []
    for style, path in paths:
        points = re.findall(r"([ML])(\S+) ([^ML]+)", path)
        found.append((style, [(kind, float(x), float(y)) for kind, x, y in points]))
    return found


def ticks(page, axis):
    """[(place, value)] of the first chart's ticks: `axis` is "x" (the row of steps) or "y"."""
    texts = page.js(
        f"[...document.querySelector({CHART!r}).querySelectorAll(':scope > text')].map(t => "
        "[t.getAttribute('class'), +t.getAttribute('x'), +t.getAttribute('y'), t.textContent])"
    )
    lowest = max(y for _, _, y, _ in texts)
    if axis == "x":
        return [(x, float(text)) for kind, x, y, text in texts if y == lowest and kind != "left"]
    return [(y - 4, float(t)) for kind, _, y, t in texts if kind == "left" and t[:1].isdigit()]


@pytest.mark.parametrize("log", [False, True])
def test_curves_are_drawn_to_the_scale_beside_them(chromium, tmp_path, log):
    """Values that are read back from the picture with its axes are those of the run."""
    show(chromium, write_report([save(tmp_path / "run")]))
    if log:
        click(chromium, ".switch input")
    points = next(points for style, points in curves(chromium) if style == "line")  # the test set
    (low, first), *_, (high, second) = ticks(chromium, "y")
    scale, unscale = (math.log, math.exp) if log else (float, float)
    slope = (scale(second) - scale(first)) / (high - low)
    values = [unscale((y - low) * slope + scale(first)) for _, _, y in points]
    np.testing.assert_allclose(values, [2.5, *TESTS], rtol=0.02)
    (left, first), *_, (right, second) = ticks(chromium, "x")
    assert (first, second) == (10, 40)
    steps = [first + (x - left) / (right - left) * (second - first) for _, x, _ in points]
    np.testing.assert_allclose(steps, [0, 10, 20, 30, 40], atol=0.1)


def test_a_gap_is_not_drawn(chromium, tmp_path):
    values = [0.5, 0.25, None, 0.125, 0.0625, None, 0.1]
    lines = [
        {"epoch": e, "step": e, "test_loss": value, "end_of_epoch": True}
        for e, value in enumerate(values, 1)
    ]
    show(chromium, write_report([save(tmp_path / "run", lines)]))
    [(_, points)] = curves(chromium)
    assert "".join(kind for kind, _, _ in points) == "MLMLM"  # the last is only a dot


@pytest.mark.parametrize(
    ("low", "high"),
    [(24850, 24950), (1.2e7, 1.21e7), (1.20e-4, 1.23e-4), (0, 1e-5), (0, 3e8), (3, 9e4), (-2, 2)],
)
def test_neighbouring_ticks_have_different_labels_which_are_their_values(
    chromium, low, high, tmp_path
):
    show(chromium, write_report([save(tmp_path / "run")]))
    pairs = chromium.js(f"ticks({low}, {high}, 5)")
    labels = [label for _, label in pairs]
    assert len(set(labels)) == len(labels) > 1
    units = {"K": "e3", "M": "e6"}
    read = [re.sub("[KM]", lambda unit: units[unit[0]], text.replace(",", "")) for text in labels]
    np.testing.assert_allclose([float(t) for t in read], [v for v, _ in pairs], atol=1e-12)
    apart = {round(b / a, 6) for a, b in itertools.pairwise(np.diff([v for v, _ in pairs]))}
    assert apart <= {1}


def test_pointing_dragging_hiding_and_keys(chromium, tmp_path):
    folder = save(tmp_path / "run")
    save_pictures(folder)
    path = write_report([folder])
    show(chromium, path)
    left, top, width, height = box(chromium, CHART)
    assert width > 300 and height > 150
    chromium.point_at(left + 0.76 * width, top + height / 2)  # near the end of epoch 3 of 4
    assert chromium.js(TIP) == "epoch 3 · step 30 train 0.25 test 0.375"

    drag(chromium, (left + 0.55 * width, top + 50), (left + 0.9 * width, top + 50))
    steps = [step for _, step in ticks(chromium, "x")]
    assert min(steps) >= 20 and max(steps) < 40
    press(chromium, "End")
    assert "epoch 4 · step 36 train" in chromium.js(TIP)
    click(chromium, "#reset")
    assert [step for _, step in ticks(chromium, "x")] == [10, 20, 30, 40]

    count = len(curves(chromium))
    click(chromium, LEGEND)  # the training set: two lines
    assert len(curves(chromium)) == count - 2
    assert chromium.js(f"document.querySelector({LEGEND!r}).ariaPressed") == "false"
    chromium.js(f"document.querySelector({CHART!r}).focus()")
    press(chromium, "Home")
    assert chromium.js(TIP) == "before training test 2.5"
    press(chromium, "ArrowRight")
    assert chromium.js(TIP) == "epoch 1 · step 10 test 1.25"
    press(chromium, "+")
    assert max(step for _, step in ticks(chromium, "x")) < 40
    press(chromium, "Escape")
    assert [step for _, step in ticks(chromium, "x")] == [10, 20, 30, 40]

    cell = box(chromium, ".confusion td.wrong")
    chromium.point_at(cell[0] + 5, cell[1] + 5)
    assert chromium.js(TIP) == "0, taken for 1: 2 (20.0% of its row)"
    assert chromium.complaints() == []
    fetched = [url for url in chromium.requests() if not url.startswith("data:image/png")]
    assert fetched == [path.as_uri()]
    light = chromium.js("getComputedStyle(document.body).backgroundColor")
    show(chromium, path, width=360, dark=True)
    assert chromium.js("document.documentElement.scrollWidth") == 360  # nothing is wider
    assert box(chromium, CHART)[2] > 200
    assert chromium.js("getComputedStyle(document.body).backgroundColor") != light


def test_a_page_without_its_script_shows_the_final_values(chromium, tmp_path):
    chromium.ask("Emulation.setScriptExecutionDisabled", value=True)
    chromium.open(write_report([save(tmp_path / "run")]))
    shown = chromium.js("document.body.innerText.split(/\\s+/).join(' ')")
    chromium.ask("Emulation.setScriptExecutionDisabled", value=False)
    assert "loss train 0.1250 test 0.4375" in shown and "best test loss 0.3750" in shown
    assert '"names"' not in shown and "Drag over" not in shown


def test_an_attack_in_every_text_of_a_run_does_nothing(chromium, tmp_path):
    evil, other = save_evil(tmp_path / "evil"), save(tmp_path / "other")
    for path in (write_report([evil]), write_report([evil, other], tmp_path / "two.html")):
        show(chromium, path, width=360)
        assert chromium.js("document.title").startswith(EVIL)
        left, top, width, height = box(chromium, CHART)
        chromium.point_at(left + width / 2, top + height / 2)
        assert "step" in chromium.js(TIP)
        if name := chromium.js("document.querySelector('.key button')?.value"):
            at = box(chromium, ".key button")
            chromium.point_at(at[0] + 5, at[1] + 5)  # fades the lines of the other run
            shown = "[...document.querySelectorAll('.chart g:not(.away)')]"
            names = chromium.js(f"{shown}.map(g => JSON.parse(g.dataset.names)[0])")
            assert set(names) == {name}
        assert chromium.js("typeof window.evil") == "undefined"
        assert chromium.complaints() == []  # the page's policy would report whatever it blocked
        assert all(url.startswith(("file:", "data:image/png")) for url in chromium.requests())
        assert chromium.js("document.documentElement.scrollWidth") == 360
