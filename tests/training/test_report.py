"""The report of a run: what its page says, that it says it whatever the run left, and that it is as it should be in a browser."""

import base64
import fcntl
import hashlib
import json
import math
import os
import random
import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest

from tests.training.browser import PROGRAM, browser
from training.report.numbers import duration, log_marks, marks, plain, short, thinned
from training.report.page import write_report
from training.runs.resume import close, locked
from training.watching.pictures import png
from utils import UserError

CONFIG = {
    "title": "Sample",
    "seed": 1,
    "model": {"name": "mlp", "args": {"dims": [16]}},
    "training": {"epochs": 4},
}
ENVIRONMENT = {
    "command": ["train.py", "-c", "c.json"],
    "python": "3.11",
    "packages": {"jax": "1.2"},
    "data": {"train": {"examples": 9}},
}
LOSSES, TESTS = [1.6338145732879639, 0.5, 0.25, 0.125], [1.25, 0.5, 0.375, 0.4375]
EVIL = '"><script>window.evil = 1</script><img src="http://127.0.0.1:1/x" onerror="window.evil = 1">\'</title></style>&amp;'
VOID = {"meta", "img", "input", "br"}


def rows(losses=LOSSES, tests=TESTS, steps=10):
    """Two lines within every epoch, and the one that closes it."""
    yield {"epoch": 0, "step": 0, "initial": True, "test_loss": 2.5, "test_accuracy": 0.1}
    for epoch, (train, test) in enumerate(zip(losses, tests, strict=True), 1):
        for step in (3, 6):
            line = {
                "epoch": epoch,
                "step": (epoch - 1) * steps + step,
                "train_loss": train * (1 + 1 / step),
            }
            yield line | {
                "learning_rate": 0.001 * epoch,
                "examples_per_second": 1000.0 + epoch,
                "waiting": 0.01,
            }
        line = {"train_loss": train, "train_accuracy": 1 - train / 2, "test_loss": test}
        if test is not None:
            line |= {"test_accuracy": 1 - test / 2} | {
                f"test_loss/{replica}": test + replica for replica in (0, 1)
            }
        line |= {"gradient_norm/blocks/0/weight": 2.0 * epoch}
        line |= {
            "seconds": 30.0,
            "compile_seconds": 1.0 if epoch == 1 else 0.0,
            "examples_per_second": 900.0 + epoch,
        }
        yield {"epoch": epoch, "step": epoch * steps, **line, "end_of_epoch": True}


def save(folder, lines=None, config=CONFIG, finished=True):
    """A run's folder."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in (rows() if lines is None else lines))
    )
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    log = "[main INFO]    : 2026-11-20 {} - {}\n"
    (folder / "train.log").write_text(
        log.format("13:14:22,345", "The model has 12730 parameters") + log.format("13:59:01,1", ".")
    )
    if finished:
        (folder / "finished.json").write_text("{}")
    return folder


def picture_files(folder, matrix=((8, 2), (1, 9)), evil=False):
    """What callbacks draw."""
    (folder / "pictures").mkdir()
    dots = png(np.arange(64, dtype=np.uint8).reshape(8, 8))
    name = EVIL if evil else "test"
    one = {
        "index": 7,
        "label": name if evil else 0,
        "predicted": name if evil else 1,
        "loss": 3.25,
        "png": base64.b64encode(dots).decode(),
    }
    (folder / "pictures" / "confusion_matrix-test.json").write_text(
        json.dumps({"set": name, "epoch": 4, "matrix": matrix})
    )
    (folder / "pictures" / "worst-test.json").write_text(
        json.dumps({"set": name, "epoch": 4, "examples": [one]})
    )
    (folder / "pictures" / "first_batch.png").write_bytes(dots)
    return dots


class Page(HTMLParser):
    """The elements of a page: (name, attributes, its text, the names around it)."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.open = [], []
        self.source = path.read_text()
        self.feed(self.source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        element = [tag, dict(attributes), "", [e[0] for e in self.open]]
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def all(self, tag, **attributes):
        wanted = {key.rstrip("_"): value for key, value in attributes.items()}
        return [
            e
            for e in self.elements
            if e[0] == tag and all(e[1].get(k) == v for k, v in wanted.items())
        ]

    def texts(self, tag, **attributes):
        return [text for _, _, text, _ in self.all(tag, **attributes)]

    def charts(self):
        """{title: what its script draws from}"""
        figures = [
            e[2]
            for e in self.elements
            if e[0] == "figure" and e[1].get("class", "").startswith("chart")
        ]
        titles = [
            e[2]
            for e in self.all("h3")
            if e[3][-2:] == ["figure", "figcaption"]
            and e[2] not in ("confusion matrix", "worst mistakes")
        ]
        return {
            title: json.loads(text[text.index("{") :])
            for title, text in zip(titles, figures, strict=True)
        }


def report(*folders, **options):
    return Page(write_report(folders, **options))


def test_the_numbers_at_a_glance(tmp_path):
    lines = [
        *rows(),
        {"epoch": 4, "step": 40, "final": "checkpoint-epoch_3", "test_accuracy": 0.815},
    ]
    page = report(save(tmp_path / "run", lines))
    tiles = page.texts("div", class_="tile")
    assert "best test loss0.3750epoch 3; last 0.4375" in tiles
    assert "best test accuracy0.8125epoch 3; last 0.7812" in tiles
    assert "final test accuracy0.8150after training, of epoch 3" in tiles
    (strip,) = page.texts("dl", class_="strip")
    assert (
        strip
        == "epochs4 of 4steps40parameters12,730training time2 min 0 s (1 s compiling)throughput902.5 examples/swaiting for data1%"
    )
    assert page.texts("h1") == ["Sample finished"]
    assert "run \N{MIDDLE DOT} 2026-11-20 13:14:22 to 13:59:01" in page.texts("p", class_="muted")
    assert page.texts("title") == ["Sample \N{MIDDLE DOT} run"]


def test_what_is_best_is_told_by_the_name_or_by_the_config(tmp_path):
    lines = [
        {"epoch": e, "step": e, "test_loss": 1.0, "test_score": s, "end_of_epoch": True}
        for e, s in enumerate([2.0, 3.0, 1.0, 3.0], 1)
    ]
    tiles = report(save(tmp_path / "unknown", lines)).texts("div", class_="tile")
    assert [tile for tile in tiles if "score" in tile] == []
    for mode, best in (("min", "1epoch 3; last 3"), ("max", "3epoch 2; last 3")):
        config = CONFIG | {"checkpoint": {"monitor": "test_score", "mode": mode}}
        tiles = report(save(tmp_path / mode, lines, config)).texts("div", class_="tile")
        assert f"best test score{best}" in tiles


def test_charts_hold_every_value(tmp_path):
    charts = report(save(tmp_path / "run")).charts()
    assert list(charts) == [
        "loss",
        "accuracy",
        "learning rate",
        "examples per second",
        "share of time waiting",
    ]
    loss = {(line["label"], len(line["x"])): line for line in charts["loss"]["lines"]}
    assert loss["test", 5]["x"] == [0, 10, 20, 30, 40]
    assert loss["test", 5]["y"] == [2.5, *TESTS]
    np.testing.assert_allclose(loss["train", 4]["y"], LOSSES, rtol=1e-6)
    assert loss["train", 8]["x"] == [3, 6, 13, 16, 23, 26, 33, 36]
    np.testing.assert_allclose(
        loss["train", 8]["y"][:2], [LOSSES[0] * 4 / 3, LOSSES[0] * 7 / 6], rtol=1e-6
    )
    assert len(loss) == 3  # replicas are drawn, but not told of
    assert charts["learning rate"]["lines"][0]["y"] == [
        0.001,
        0.001,
        0.002,
        0.002,
        0.003,
        0.003,
        0.004,
        0.004,
    ]


def test_waiting_is_drawn_where_there_was_any(tmp_path):
    for share, drawn in ((0.0, False), (0.3, True)):
        page = report(save(tmp_path / f"{drawn}", [row | {"waiting": share} for row in rows()]))
        assert ("share of time waiting" in page.charts()) == drawn
        assert f"waiting for data{100 * share:.0f}%" in page.texts("dl", class_="strip")[0]


@pytest.mark.parametrize("kind", ["linear", "log"])
def test_curves_are_drawn_to_the_scale_beside_them(tmp_path, kind):
    """Read back from the picture by its axes, the values are those of the run."""
    page = Page(write_report([save(tmp_path / "run")]))
    plot = page.source.index(f'<div class="plot {kind}">')
    marked = re.findall(r'<span style="bottom:([\d.]+)%">([^<]+)</span>', page.source[plot:])[:2]
    (low, first), (high, second) = [(float(share), float(name)) for share, name in marked]
    below = re.search(
        r'<span style="left:([\d.]+)%"><span>(\d+)</span><small>(\d+)</small>', page.source[plot:]
    )
    share, epoch, step = map(float, below.groups())
    assert (share, epoch, step) == (25, 1, 10)  # of four epochs
    groups = re.findall(
        r'<g style="--c:var\(--c0\)"[^>]*><path class="line" d="([^"]+)">', page.source[plot:]
    )
    places = [tuple(map(int, place)) for place in re.findall(r"[ML](-?\d+) (-?\d+)", groups[0])]
    scale = math.log if kind == "log" else float
    unscale = math.exp if kind == "log" else float
    ups = [
        (100 - y / 10 - low) / (high - low) * (scale(second) - scale(first)) + scale(first)
        for _, y in places
    ]
    np.testing.assert_allclose([unscale(up) for up in ups], [2.5, *TESTS], rtol=0.02)
    np.testing.assert_allclose(
        [x / 20 / share * step for x, _ in places], [0, 10, 20, 30, 40], atol=0.1
    )


def test_null_is_a_gap(tmp_path):
    page = report(save(tmp_path / "run", gapped()))
    line = next(line for line in page.charts()["loss"]["lines"] if line["label"] == "test")
    assert line["y"] == [0.5, 0.25, None, 0.125, 0.0625]
    (drawn,) = re.findall(
        r'class="line" d="([^"]+)"', page.source.split('<div class="plot log">')[0]
    )[-1:]
    assert re.fullmatch(r"M\d+ \d+L\d+ \d+M\d+ \d+L\d+ \d+", drawn)


def gapped():
    for epoch, value in enumerate([0.5, 0.25, None, 0.125, 0.0625], 1):
        yield {
            "epoch": epoch,
            "step": epoch,
            "train_loss": None,
            "test_loss": value,
            "end_of_epoch": True,
        }


def test_long_runs_are_thinned_but_keep_their_spikes(tmp_path):
    def lines():
        for step in range(1, 20_001):
            yield {
                "epoch": 1,
                "step": step,
                "each_step": True,
                "train_loss": 99.5 if step == 7777 else 1 / step,
            }
        yield {"epoch": 1, "step": 20_000, "train_loss": 0.5, "end_of_epoch": True}

    page = report(save(tmp_path / "run", lines()))
    assert len(page.source) < 200_000
    fine = max(page.charts()["loss"]["lines"], key=lambda line: len(line["x"]))
    assert len(fine["x"]) <= 800
    assert fine["y"][fine["x"].index(7777)] == 99.5
    assert fine["x"][0] == 1 and fine["x"][-1] == 20_000


def test_thinning_keeps_extremes_ends_and_gaps():
    draw = np.random.default_rng(0)
    for size in (5, 100, 5000):
        values = draw.standard_normal(size)
        values[draw.integers(size, size=size // 50)] = np.nan
        steps, kept = thinned(np.arange(size), values, 90)
        assert len(steps) <= max(90, 5)
        assert (np.diff(steps) > 0).all()
        assert {0, size - 1, int(np.nanargmax(values)), int(np.nanargmin(values))} <= set(
            steps.tolist()
        )
        np.testing.assert_array_equal(kept, values[steps])
        assert np.isnan(kept).any() == np.isnan(values).any()


def test_numbers_for_people():
    assert [plain(v) for v in (0.96123, 24900.4, 3e-5, 0.0, 12.345, 5, math.nan)] == [
        "0.9612",
        "24,900",
        "3e-05",
        "0",
        "12.35",
        "5",
        "\N{EM DASH}",
    ]
    assert [duration(s) for s in (22.94, 200, 8040, 100_000)] == [
        "22.9 s",
        "3 min 20 s",
        "2 h 14 min",
        "1 d 3 h",
    ]
    assert [short(n) for n in (1080, 12_500, 1_000_000, 3e9)] == ["1,080", "12.5k", "1M", "3G"]
    assert marks(0.03, 0.97) == [0.2, 0.4, 0.6000000000000001, 0.8]
    assert log_marks(0.02, 3) == pytest.approx([0.03, 0.1, 0.3, 1.0, 3.0])


def test_half_lines_are_passed_over(tmp_path):
    whole = report(save(tmp_path / "whole", finished=False))
    cut = save(tmp_path / "cut", finished=False)
    with open(cut / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 5, "step": 43, "tra')  # a run in progress
    page = report(cut)
    assert page.charts() == whole.charts()
    assert not page.all("p", class_="problem")
    (cut / "metrics.jsonl").write_text("nonsense\n[]\n" + (cut / "metrics.jsonl").read_text())
    page = report(cut)
    assert page.charts() == whole.charts()
    assert page.texts("p", class_="problem") == [
        "3 lines of metrics.jsonl cannot be read and are left out"
    ]


def test_what_is_missing_or_damaged_is_said_in_its_place(tmp_path):
    folder = save(tmp_path / "run")
    (folder / "pictures").mkdir()
    (folder / "metrics.jsonl").unlink()
    (folder / "config.json").write_text("{")
    (folder / "environment.json").write_text("[1]")
    (folder / "pictures" / "first_batch.png").write_text("GIF")
    (folder / "pictures" / "worst-test.json").write_text("{}")
    for name, matrix in {
        "a": [[1, 2]],
        "b": [[-1]],
        "c": "x",
        "d": [[float("inf")]],
        "e": None,
        "f": [],
    }.items():
        (folder / "pictures" / f"confusion_matrix-{name}.json").write_text(
            json.dumps({"matrix": matrix})
        )
    problems = report(folder).texts("p", class_="problem")
    for said in (
        "there is no metrics.jsonl: nothing was measured yet",
        "config.json cannot be read: it is not whole, or not JSON",
        "environment.json cannot be read: it holds no object",
        "first_batch.png cannot be shown: it is too large, or no PNG",
        "worst-test.json cannot be shown: it has no list of examples",
        "confusion_matrix-a.json cannot be shown: its matrix is not square: 1 x 2",
        "confusion_matrix-b.json cannot be shown: its matrix has counts that are negative or not finite",
        "confusion_matrix-c.json cannot be shown: its matrix is not one of numbers",
    ):
        assert said in problems
    assert len(problems) == 11


def test_no_damage_is_too_much(tmp_path):
    """Files cut off, with bytes exchanged, or with values of other types: there is a page every time."""
    folder, draw = save(tmp_path / "run"), random.Random(0)
    picture_files(folder)
    names = [
        "metrics.jsonl",
        "config.json",
        "environment.json",
        "train.log",
        *(f"pictures/{p.name}" for p in folder.glob("pictures/*")),
    ]
    sound = {name: (folder / name).read_bytes() for name in names}
    odd = [
        b"null",
        b"-1",
        b"1e999",
        b"9" * 400,
        b'"x"',
        b"[[]]",
        b"{}",
        b"true",
        b"[" * 3000,
        b'"\\ud800"',
        b"0",
        b"1e-320",
        b"[1, {}]",
    ]
    for _ in range(60):
        for name in draw.sample(names, 2):
            data = bytearray(sound[name])
            if draw.random() < 0.7:  # a value for another one
                places = list(re.finditer(rb"(?<=: )([^,{}\[\]\s]+)", data)) or [
                    re.match(rb".*", data)
                ]
                place = draw.choice(places)
                data[place.start() : place.end()] = draw.choice(odd)
            else:
                data = (
                    data[: draw.randrange(len(data))]
                    if draw.random() < 0.5
                    else bytearray(draw.randbytes(40)) + data
                )
            (folder / name).write_bytes(bytes(data))
        assert write_report([folder], tmp_path / "page.html").read_text().endswith("</html>")
        for name, data in sound.items():
            (folder / name).write_bytes(data)


def test_a_folder_that_is_no_run(tmp_path):
    save(tmp_path / "saved" / "Sample" / "2026")
    with pytest.raises(UserError, match=r"nowhere: there is no such folder; name that of a run"):
        write_report([tmp_path / "nowhere"])
    with pytest.raises(
        UserError, match=r"saved: is not the folder of a run.*did you mean .*saved/Sample/2026\?"
    ):
        write_report([tmp_path / "saved" / "Sample" / "2026", tmp_path / "saved"])
    with pytest.raises(UserError, match="of which run"):
        write_report([])


def test_whether_a_run_is_finished_running_or_stopped(tmp_path):
    folder = save(tmp_path / "run", finished=False)
    assert report(folder).texts("h1") == ["Sample stopped"]
    handle = os.open(folder, os.O_RDONLY)  # as another process has it
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert report(folder).texts("h1") == ["Sample running"]
    os.close(handle)
    mine = locked(folder)  # a run that writes its report at its end
    assert report(folder).texts("h1") == ["Sample stopped"]
    close(mine)
    (folder / "finished.json").write_text("{}")
    assert report(folder).texts("h1") == ["Sample finished"]


def test_runs_side_by_side(tmp_path):
    first = save(tmp_path / "first", config=CONFIG | {"title": "A"})
    changed = CONFIG | {
        "title": "B",
        "model": {"name": "mlp", "args": {"dims": [16], "act": "relu"}},
        "seed": 2,
    }
    second = save(tmp_path / "second", rows(tests=[1.0, 0.75, 0.5, 0.25]), config=changed)
    path = write_report([first, second])
    assert path == first / "comparison.html"
    page = Page(path)
    cells = [text for text in page.texts("td") if "epoch" in text]
    assert cells == ["0.3750 epoch 3", "0.8125 epoch 3", "0.2500 epoch 4", "0.8750 epoch 4"]
    assert page.texts("td", class_="first") == cells[2:]
    table = page.source[page.source.index("Differences of the configs") :]
    assert re.findall(r'<th scope="row">([^<]+)', table) == ["seed", "model.args.act"]
    assert re.findall(r"<td[^>]*>([^<]+)", table) == ["1", "2", "\N{EM DASH}", "&quot;relu&quot;"]
    tested = [
        *rows(tests=[None] * 4),
        {"epoch": 4, "step": 40, "final": "checkpoint-epoch_3", "test_loss": 0.125},
    ]
    final = report(save(tmp_path / "third", tested), first, target=tmp_path / "page.html")
    assert final.texts("td", class_="first")[0] == "0.1250 final"
    lines = page.charts()["loss"]["lines"]
    assert {(line["label"], line["colour"]) for line in lines} == {
        ("A train", 0),
        ("A test", 0),
        ("B train", 1),
        ("B test", 1),
    }
    assert 'class="dash"' in page.source  # the training sets
    same = report(first, first, first, target=tmp_path / "same.html")
    assert "Their configs are the same." in same.source
    assert (
        len({e[1]["data-run"] for e in same.all("li") if "data-run" in e[1]}) == 3
    )  # each has a name of its own


def test_a_confusion_matrix(tmp_path):
    folder = save(tmp_path / "run")
    dots = picture_files(folder, matrix=[[8, 2, 0], [0, 9, 1], [3, 0, 7]])
    page = report(folder)
    cells = [e for e in page.all("td") if "data-tip" in e[1]]
    assert [text for _, _, text, _ in cells] == ["8", "2", "0", "0", "9", "1", "3", "0", "7"]
    assert cells[1][1]["data-tip"] == "0, taken for 1: 2 (20.0% of its row)"
    assert cells[8][1]["data-tip"] == "2, right: 7 (70.0% of its row)"
    confused = [text for text in page.texts("td") if "taken for" in text]
    assert confused == ["2 taken for 0", "0 taken for 1", "1 taken for 2"]
    assert "24 of 30 right (80.0%)." in page.source
    assert "0 taken for 1" in page.texts("div", class_="card")[0]
    images = [
        base64.b64decode(e[1]["src"].removeprefix("data:image/png;base64,"))
        for e in page.all("img")
    ]
    assert images == [dots, dots]


def test_matrices_of_many_classes_are_drawn(tmp_path):
    folder = save(tmp_path / "run")
    picture_files(folder, matrix=(np.eye(50, dtype=int) * 5 + np.eye(50, k=2, dtype=int)).tolist())
    squares = report(folder).all("rect")
    assert len(squares) == 50 + 48
    assert {"x": "4", "y": "2", "class": "wrong"}.items() <= next(
        e[1] for e in squares if "2, taken for 4: 1" in e[1]["data-tip"]
    ).items()


def test_config_environment_warnings_and_files(tmp_path):
    folder = save(tmp_path / "run")
    (folder / "odd <&\"' #?%.txt").write_text("")
    (folder / "train.log").write_text(
        "[main WARNING] : 2026-11-20 13:14:22,345 - careful\n[main INFO] - not this\n"
    )
    page = report(folder)
    facts = [
        text for text in page.texts("div") if text.startswith(("model", "command", "packages"))
    ]
    assert facts == ["modelmlp(dims=[16])", "commandtrain.py -c c.json", "packagesjax 1.2"]
    assert json.loads(page.texts("pre")[1]) == CONFIG
    assert page.texts("pre")[0] == "[main WARNING] : 2026-11-20 13:14:22,345 - careful"
    links = {unquote(urlsplit(e[1]["href"]).path).removeprefix("./") for e in page.all("a")}
    assert links == {path.name for path in folder.iterdir()} - {"report.html"}
    elsewhere = report(folder, target=tmp_path / "page.html")
    assert all(
        (tmp_path / unquote(urlsplit(e[1]["href"]).path)).exists() for e in elsewhere.all("a")
    )
    leaves = elsewhere.source[elsewhere.source.index("Leaf by leaf (1)") :]
    assert "blocks/0/weight" in leaves and "<b>8</b>" in leaves


@pytest.fixture
def evil(tmp_path):
    """A run in which every text is an attack."""
    lines = [
        *rows(),
        {
            "epoch": 5,
            "step": 50,
            f"test_{EVIL}": 1.0,
            EVIL: 2.0,
            f"gradient_norm/{EVIL}": 1.0,
            "test_loss": 1.0,
        },
    ]
    lines += [{"epoch": 5, "step": 50, "final": EVIL, "test_loss": 1.0}]
    folder = save(
        tmp_path / "evil",
        lines,
        {"title": EVIL, EVIL: EVIL, "model": {"name": EVIL, "args": {EVIL: EVIL}}, "data": EVIL},
    )
    (folder / "environment.json").write_text(
        json.dumps({EVIL: {EVIL: {EVIL: [EVIL]}}, "command": [EVIL]})
    )
    (folder / "train.log").write_text(f"[main WARNING] {EVIL}\n")
    (folder / EVIL.replace("/", "")).write_text("")
    picture_files(folder, evil=True)
    return folder


def test_text_from_files_stays_text(evil, tmp_path):
    plain_page = report(save(tmp_path / "plain"))
    for page in (report(evil), report(evil, tmp_path / "plain", target=tmp_path / "two.html")):
        assert page.texts("title")[0].startswith(EVIL)
        scripts = [e for e in page.all("script") if e[1].get("type") != "application/json"]
        assert [e[2] for e in scripts] == [plain_page.texts("script")[-1]]
        assert not [e for e in page.elements if any(name.startswith("on") for name in e[1])]
        assert all(
            e[1]["src"].startswith("data:image/png;base64,") for e in page.elements if "src" in e[1]
        )
        assert all(e[1]["href"].startswith("./") for e in page.elements if "href" in e[1])
        policy = page.all("meta")[1][1]["content"]
        allowed = base64.b64encode(hashlib.sha256(scripts[0][2].encode()).digest()).decode()
        assert (
            policy
            == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
        )


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """One browser for all tests of this file."""
    if PROGRAM is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


def box(page, selector):
    """Where an element is once it is scrolled to: left, top, width, height."""
    rectangle = "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]"
    return page.js(f"(e => {{ {rectangle}; }})(document.querySelector({selector!r}))")


def test_in_a_browser(chromium, tmp_path):
    folder = save(tmp_path / "run")
    picture_files(folder)
    path = write_report([folder])
    chromium.open(path)
    assert chromium.complaints() == []
    assert [url for url in chromium.requests() if not url.startswith("data:image/png")] == [
        path.as_uri()
    ]
    left, top, width, height = box(chromium, ".plot.linear .area")
    assert width > 300 and height > 150
    drawn = "[...document.querySelectorAll('.plot.linear .line')].map(l => l.getBoundingClientRect()).filter(b => b.width > 0).length"
    assert chromium.js(drawn) == 7  # train and test of two metrics, and three others

    chromium.point_at(
        left + 0.76 * width, top + height / 2
    )  # near the end of the third of four epochs
    told = chromium.js("document.getElementById('tip').innerText").split()
    assert " ".join(told) == "epoch 3 · step 30 train 0.25 test 0.375"
    cell = box(chromium, ".confusion td.wrong")
    chromium.point_at(cell[0] + 5, cell[1] + 5)
    assert (
        chromium.js("document.getElementById('tip').innerText")
        == "0, taken for 1: 2 (20.0% of its row)"
    )

    switch = box(chromium, ".switch input")
    chromium.click(switch[0] + 5, switch[1] + 5)
    shown = "[...document.querySelector('.chart').querySelectorAll('.plot')].map(p => p.checkVisibility())"
    assert chromium.js(shown) == [False, True]

    assert chromium.complaints() == []
    light = chromium.js("getComputedStyle(document.body).backgroundColor")
    chromium.open(path, width=360, dark=True)
    assert chromium.js("document.documentElement.scrollWidth") == 360  # nothing sticks out
    assert box(chromium, ".area")[2] > 200
    assert chromium.js("getComputedStyle(document.body).backgroundColor") != light


def test_an_evil_title_in_a_browser(chromium, evil, tmp_path):
    for path in (
        write_report([evil]),
        write_report([evil, save(tmp_path / "other")], tmp_path / "two.html"),
    ):
        chromium.open(path, width=360)
        assert chromium.js("document.title").startswith(EVIL)
        left, top, width, height = box(chromium, ".area")
        chromium.point_at(left + width / 2, top + height / 2)
        assert "step" in chromium.js("document.getElementById('tip').innerText")
        if name := chromium.js("document.querySelector('li[data-run]')?.dataset.run"):
            at = box(chromium, "li[data-run]")
            chromium.point_at(at[0] + 5, at[1] + 5)  # sets the lines of the other run back
            shown = "[...document.querySelectorAll('.area g:not(.away)')].map(g => g.dataset.run)"
            assert set(chromium.js(shown)) == {name}
        assert chromium.js("typeof window.evil") == "undefined"
        assert (
            chromium.complaints() == []
        )  # the page's policy would complain of whatever had been let in
        assert all(url.startswith(("file:", "data:image/png")) for url in chromium.requests())
        assert chromium.js("document.documentElement.scrollWidth") == 360
