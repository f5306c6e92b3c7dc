"""The report in a real browser: nothing fails, nothing is fetched, and pointing shows values."""

import pytest

from tests.training.browser import PROGRAM, browser
from tests.training.report.saved_run import EVIL, save, save_evil, save_pictures
from training.report.page import write_report

TIP = "document.getElementById('tip').innerText"


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


def test_charts_matrices_and_layouts(chromium, tmp_path):
    folder = save(tmp_path / "run")
    save_pictures(folder)
    path = write_report([folder])
    chromium.open(path)
    assert chromium.complaints() == []
    fetched = [url for url in chromium.requests() if not url.startswith("data:image/png")]
    assert fetched == [path.as_uri()]
    left, top, width, height = box(chromium, ".plot.linear .area")
    assert width > 300 and height > 150
    boxes = (
        "[...document.querySelectorAll('.plot.linear .line')].map(l => l.getBoundingClientRect())"
    )
    # The training and test sets of two metrics, and three other lines.
    assert chromium.js(f"{boxes}.filter(b => b.width > 0).length") == 7

    chromium.point_at(left + 0.76 * width, top + height / 2)  # near the end of epoch 3 of 4
    assert " ".join(chromium.js(TIP).split()) == "epoch 3 · step 30 train 0.25 test 0.375"
    cell = box(chromium, ".confusion td.wrong")
    chromium.point_at(cell[0] + 5, cell[1] + 5)
    assert chromium.js(TIP) == "0, taken for 1: 2 (20.0% of its row)"

    switch = box(chromium, ".switch input")
    chromium.click(switch[0] + 5, switch[1] + 5)
    plots = "[...document.querySelector('.chart').querySelectorAll('.plot')]"
    assert chromium.js(f"{plots}.map(p => p.checkVisibility())") == [False, True]

    assert chromium.complaints() == []
    light = chromium.js("getComputedStyle(document.body).backgroundColor")
    chromium.open(path, width=360, dark=True)
    assert chromium.js("document.documentElement.scrollWidth") == 360  # nothing is wider
    assert box(chromium, ".area")[2] > 200
    assert chromium.js("getComputedStyle(document.body).backgroundColor") != light


def test_an_attack_in_every_text_of_a_run_does_nothing(chromium, tmp_path):
    evil, other = save_evil(tmp_path / "evil"), save(tmp_path / "other")
    for path in (write_report([evil]), write_report([evil, other], tmp_path / "two.html")):
        chromium.open(path, width=360)
        assert chromium.js("document.title").startswith(EVIL)
        left, top, width, height = box(chromium, ".area")
        chromium.point_at(left + width / 2, top + height / 2)
        assert "step" in chromium.js(TIP)
        if name := chromium.js("document.querySelector('li[data-run]')?.dataset.run"):
            at = box(chromium, "li[data-run]")
            chromium.point_at(at[0] + 5, at[1] + 5)  # fades the lines of the other run
            shown = "[...document.querySelectorAll('.area g:not(.away)')].map(g => g.dataset.run)"
            assert set(chromium.js(shown)) == {name}
        assert chromium.js("typeof window.evil") == "undefined"
        assert chromium.complaints() == []  # the page's policy would report whatever it blocked
        assert all(url.startswith(("file:", "data:image/png")) for url in chromium.requests())
        assert chromium.js("document.documentElement.scrollWidth") == 360
