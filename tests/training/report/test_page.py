"""What the page of a report says about one run and about several, and that it is safe to open."""

import base64
import hashlib
import json
import re
from urllib.parse import unquote, urlsplit

from tests.training.report.saved_run import (
    CONFIG,
    EVIL,
    Page,
    report,
    rows,
    save,
    save_evil,
    save_samples,
)
from training.report.page import write_report
from training.report.read import read_run


def test_the_numbers_at_a_glance(tmp_path):
    final = {"epoch": 4, "step": 40, "final": "checkpoint-epoch_3", "test_accuracy": 0.815}
    page = report(save(tmp_path / "run", [*rows(), final]))
    tiles = page.texts("div", class_="tile")
    assert "best test loss0.3750epoch 3; last 0.4375" in tiles
    assert "best test accuracy0.8125epoch 3; last 0.7812" in tiles
    assert "final test accuracy0.8150after training, of epoch 3" in tiles
    (strip,) = page.texts("dl", class_="strip")
    assert strip == (
        "epochs4 of 4steps40parameters12,730training time2 min 0 s (1 s compiling)"
        "throughput902.5 examples/swaiting for data1%"
    )
    assert page.texts("h1") == ["Sample finished"]
    assert "run \N{MIDDLE DOT} 2026-11-20 13:14:22 to 2026-11-20 13:59:01" in page.texts(
        "p", class_="muted"
    )
    assert page.texts("title") == ["Sample \N{MIDDLE DOT} run"]


def test_an_evaluation_within_an_epoch_is_shown_and_may_be_the_best(tmp_path):
    within = {"epoch": 2, "step": 13, "evaluation": True, "test_loss": 0.0625}
    lines = sorted([*rows(), within], key=lambda row: row["step"])
    folder = save(tmp_path / "run", lines)
    assert read_run(folder).best("test_loss") == (0.0625, 2, 13)
    tiles = report(folder).texts("div", class_="tile")
    assert "best test loss0.0625epoch 2; last 0.4375" in tiles


def test_the_name_or_the_config_decides_which_value_is_best(tmp_path):
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


def test_config_environment_warnings_and_files(tmp_path):
    folder = save(tmp_path / "run")
    (folder / "odd <&\"' #?%.txt").write_text("")
    warning = "[main WARNING] : 2026-11-20 13:14:22,345 - careful"
    (folder / "train.log").write_text(f"{warning}\n[main INFO] - not this\n")
    page = report(folder)
    kinds = ("model", "command", "packages")
    facts = [text for text in page.texts("div") if text.startswith(kinds)]
    assert facts == ["modelmlp(dims=[16])", "commandtrain.py -c c.json", "packages{jax=1.2}"]
    assert json.loads(page.texts("pre")[1]) == CONFIG
    assert page.texts("pre")[0] == warning
    links = {unquote(urlsplit(e[1]["href"]).path).removeprefix("./") for e in page.all("a")}
    assert links == {path.name for path in folder.iterdir()} - {"report.html"}
    elsewhere = report(folder, target=tmp_path / "page.html")
    for element in elsewhere.all("a"):
        assert (tmp_path / unquote(urlsplit(element[1]["href"]).path)).exists()
    assert "Leaf by leaf (1)" in elsewhere.texts("summary")
    assert elsewhere.charts()["blocks/0/weight"]["lines"][0]["y"] == [2, 4, 6, 8]


def test_runs_side_by_side(tmp_path):
    model = {"name": "mlp", "args": {"dims": [16], "act": "relu"}}
    changed = CONFIG | {"title": "B", "model": model, "seed": 2}
    first = save(tmp_path / "first", config=CONFIG | {"title": "A"})
    second = save(tmp_path / "second", rows(tests=[1.0, 0.75, 0.5, 0.25]), config=changed)
    path = write_report([first, second])
    assert path == first / "comparison.html"
    page = Page(path)
    cells = [text for text in page.texts("td") if "epoch" in text]
    assert cells == ["0.3750 epoch 3", "0.8125 epoch 3", "0.2500 epoch 4", "0.8750 epoch 4"]
    assert page.texts("b", class_="first") == ["0.2500", "0.8750"]
    table = page.source[page.source.index("Differences of the configs") :]
    assert re.findall(r'<th scope="row">([^<]+)', table) == ["seed", "model.args.act"]
    assert re.findall(r"<td[^>]*>([^<]+)", table) == ["1", "2", "\N{EM DASH}", "relu"]
    lines = page.charts()["loss"]["lines"]
    assert [(line["names"], line["colour"], line["style"]) for line in lines] == [
        (["A", "train"], 0, "dash"),
        (["A", "test"], 0, "line"),
        (["B", "train"], 1, "dash"),
        (["B", "test"], 1, "line"),
    ]


def test_text_from_files_stays_text(tmp_path):
    evil, harmless = save_evil(tmp_path / "evil"), save(tmp_path / "plain")
    harmless_script = report(harmless).texts("script")[-1]
    for page in (report(evil), report(evil, harmless, target=tmp_path / "two.html")):
        assert page.texts("title")[0].startswith(EVIL)
        scripts = [e for e in page.all("script") if e[1].get("type") != "application/json"]
        assert [e[2] for e in scripts] == [harmless_script]
        for _, attributes, _, _ in page.elements:
            assert not any(name.startswith("on") for name in attributes)
            assert attributes.get("src", "data:image/png;base64,").startswith(
                "data:image/png;base64,"
            )
            assert attributes.get("href", "./").startswith("./")
        policy = page.all("meta")[1][1]["content"]
        digest = base64.b64encode(hashlib.sha256(scripts[0][2].encode()).digest()).decode()
        assert policy == (
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
            f"script-src 'sha256-{digest}'"
        )


def test_samples_of_a_language_model_by_step(tmp_path):
    folder = save(tmp_path / "run")
    row = {"step": 1, "epoch": 1, "prompt": "Once <b>", "text": " upon\n  a time"}
    others = [row | {"step": step, "text": f" of {step}"} for step in range(1, 101)]
    odd = ["", "damaged", "[1]", row | {"step": "7"}, row | {"text": None}, row | {"epoch": []}]
    long, many = {"text": "x" * 99_999}, [row | {"step": 102}] * 20
    last = row | long | {"step": 102}
    save_samples(folder, *others, *odd, last, *many, '{"step": 103, "epo')
    page = report(folder)
    headings = [text for text in page.texts("h3") if text.startswith("step")]
    assert headings == ["step 102 \N{MIDDLE DOT} epoch 1"]  # the newest is open
    steps = [int(text.split()[1]) for text in page.texts("summary") if text.startswith("step")]
    assert steps == sorted(steps, reverse=True) and len(steps) == 39 and steps[-1] == 1
    assert "and the texts of 61 more steps in samples.jsonl" in page.source
    texts = page.texts("pre", class_="sample")
    assert len(texts[0]) < 5000
    assert texts[-1] == "Once <b> of 1"
    assert "<b>Once &lt;b&gt;</b> upon\n  a time</pre>" in page.source
    assert texts.count("Once <b> upon\n  a time") == 7
    assert "and 13 more in samples.jsonl" in page.source
