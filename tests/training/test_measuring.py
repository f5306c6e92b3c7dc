"""What a run measures and when, seen in its lines, its rows and what callbacks get."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.mlp import mlp
from training.checkpoint import storage
from training.fit import fit
from training.loss import cross_entropy
from training.metrics import accuracy
from training.optimizers import adam, sgd
from training.run import TIMES
from training.schedules import linear
from training.tally import tracked
from training.watching.callbacks.early_stopping import early_stopping
from utils import UserError

RNG = np.random.default_rng(3)
X = RNG.normal(size=(100, 4)).astype(np.float32)
Y = ((X[:, 0] > 0) + (X[:, 1] > 0)).astype(np.int32)
TEST, VAL = (X[:37], Y[:37]), (X[40:61], Y[40:61])
MODEL = mlp((4,), 3, dims=(8,))


def run(folder=None, model=MODEL, test=TEST, val=None, **settings):
    defaults = {
        "optimizer": adam(lr=0.01),
        "epochs": 2,
        "batch_size": 16,
        "log": {"every_steps": 3},
    }
    return fit(model, (X, Y), test, val, folder=folder, **defaults | settings)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def lines_of(folder):
    """The rows within epochs."""
    return [
        row
        for row in rows(folder)
        if not {"end_of_epoch", "each_step", "initial", "final"} & row.keys()
    ]


def losses_of(done, data):
    out, _ = MODEL.apply(done.params, done.state, data[0])
    return np.asarray(jax.vmap(cross_entropy)(out, data[1]))


def loss_value(output, label):
    return cross_entropy(output, label)


class Batches:
    """An iterable of batches, whose length nobody knows."""

    def __init__(self, pause=0.0):
        self.pause = pause

    def __iter__(self):
        for i in range(0, 100, 10):
            time.sleep(self.pause)
            yield X[i : i + 10], Y[i : i + 10]


class Seen:
    """A callback that notes what it is told."""

    def __init__(self, **attributes):
        self.found = []
        vars(self).update(attributes)


def test_every_mode_of_a_held_out_set(tmp_path):
    modes = ("MEAN", "SUM", "MAX", "MIN", "STD", "SINGLE")
    done = run(
        tmp_path, metrics={m.lower(): tracked(loss_value, m, "EPOCH", "TEST") for m in modes}
    )
    losses, last = losses_of(done, TEST), done.history[-1]
    by_hand = {
        "mean": losses.mean(),
        "sum": losses.sum(),
        "max": losses.max(),
        "min": losses.min(),
        "std": losses.std(),
    }
    by_hand["single"] = losses[32:].mean()  # the mean of the last batch
    for name, value in by_hand.items():
        assert last[f"test_{name}"] == pytest.approx(value, rel=1e-4), name
        assert f"train_{name}" not in last
    assert all(set(row) & {"train_mean", "train_max"} == set() for row in rows(tmp_path))


def test_modes_within_an_epoch_are_of_the_steps_since_the_last_line(tmp_path):
    metrics = {m.lower(): tracked(loss_value, m, "STEP") for m in ("SUM", "MAX", "MIN")}
    run(tmp_path, metrics=metrics, log={"every_steps": 3, "log_all": True})
    steps, lines = [row for row in rows(tmp_path) if row.get("each_step")], lines_of(tmp_path)
    assert [row["step"] for row in steps] == list(
        range(1, 15)
    )  # the last one of each epoch is no line, and is there
    assert [row["step"] for row in lines] == [3, 6, 10, 13]
    for line in lines:
        own = [row for row in steps if line["step"] - 3 < row["step"] <= line["step"]]
        assert line["train_loss"] == pytest.approx(
            np.mean([row["train_loss"] for row in own]), rel=1e-5
        )
        assert line["train_sum"] == pytest.approx(sum(row["train_sum"] for row in own), rel=1e-5)
        assert line["train_max"] == max(row["train_max"] for row in own)
        assert line["train_min"] == min(row["train_min"] for row in own)
    ends = [row for row in rows(tmp_path) if row.get("end_of_epoch")]
    assert not any("train_sum" in row or "test_sum" in row for row in ends)


def test_every_step_that_is_logged_is_what_a_line_at_each_step_tells(tmp_path):
    quick = run(tmp_path / "a", log={"every_steps": 5, "log_all": True, "gradient_norm": True})
    slow = run(tmp_path / "b", log={"every_steps": 1, "gradient_norm": True})
    each = [row for row in rows(tmp_path / "a") if row.pop("each_step", False)]
    line = [{k: v for k, v in row.items() if k not in TIMES} for row in lines_of(tmp_path / "b")]
    assert each == line and len(each) == 14
    assert jax.tree.all(jax.tree.map(np.array_equal, quick.params, slow.params))


def test_lines_by_the_clock_change_no_bit(tmp_path):
    runs = [
        fit(
            MODEL, Batches(0.06), optimizer=adam(lr=0.01), epochs=1, folder=tmp_path / name, log=log
        )
        for name, log in (
            ("a", {"every_steps": 0, "every_seconds": 0.15}),
            ("b", {"every_steps": 0}),
        )
    ]
    assert 1 <= len(lines_of(tmp_path / "a")) < 10 and lines_of(tmp_path / "b") == []
    assert jax.tree.all(jax.tree.map(np.array_equal, runs[0].params, runs[1].params))
    (row,) = runs[0].history
    assert 0.3 < row["waiting"] <= 1  # it waited for data most of the time
    assert row["steps_per_second"] < 1 / 0.03 and row["examples_per_second"] == pytest.approx(
        10 * row["steps_per_second"]
    )


def test_norms_of_the_gradients_and_the_weights(tmp_path):
    log = {"every_steps": 1, "gradient_norm": True, "parameter_norm": True, "leaf_statistics": True}
    seen = Seen(on_step_end=lambda view: seen.found.append((dict(view.metrics), view.params)))
    start = Seen(on_training_start=lambda view: start.found.append(view.params))
    run(
        callbacks=[seen, start],
        log=log,
        optimizer=sgd(lr=0.1),
        batch_size=100,
        shuffle=False,
        epochs=1,
    )
    before, (metrics, after) = start.found[0], seen.found[0]

    def loss(params):
        return jax.vmap(cross_entropy)(MODEL.apply(params, {}, X)[0], Y).mean()

    grads = jax.grad(loss)(before)
    assert metrics["gradient_norm"] == pytest.approx(float(optax.global_norm(grads)), rel=1e-5)
    assert metrics["parameter_norm"] == pytest.approx(float(optax.global_norm(after)), rel=1e-5)
    head = float(jnp.linalg.norm(grads["head"]["weight"]))
    assert metrics["gradient_norm/head/weight"] == pytest.approx(head, rel=1e-5)
    assert metrics["parameter_norm/head/bias"] == pytest.approx(
        float(jnp.linalg.norm(after["head"]["bias"])), rel=1e-5
    )


def test_the_learning_rate_is_what_the_steps_used(tmp_path):
    halve = Seen(on_epoch_end=lambda view: {"lr_scale": 0.5}, needs=("learning_rate",))
    schedule = linear(total_steps=14)
    run(
        tmp_path,
        callbacks=[halve],
        schedule=schedule,
        rates={"learning_rate": lambda step: 0.01 * schedule(step)},
    )
    found = {row["step"]: row["learning_rate"] for row in rows(tmp_path)}
    for step, rate in found.items():
        scale = 1 if step <= 7 else 0.5
        assert rate == pytest.approx(0.01 * float(schedule(step - 1)) * scale, rel=1e-5), step


def test_a_loss_of_several_terms_is_their_sum_and_each_is_told():
    def terms(output, label):
        return {"fit": cross_entropy(output, label), "small": 0.1 * jnp.sum(output**2)}

    def summed(output, label):
        return sum(terms(output, label).values())

    both = run(loss=terms, metrics=[accuracy]), run(loss=summed, metrics=[accuracy])
    for mine, theirs in zip(*(jax.tree.leaves(done.params) for done in both), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    last = both[0].history[-1]
    assert last["test_loss"] == pytest.approx(
        last["test_loss_fit"] + last["test_loss_small"], rel=1e-6
    )
    assert last["train_loss"] == pytest.approx(
        last["train_loss_fit"] + last["train_loss_small"], rel=1e-6
    )


@pytest.mark.parametrize("stream", [False, True])
def test_concat_gathers_the_examples_in_their_order(stream):
    gather = {"logits": tracked(lambda output, label: {"out": output, "label": label}, "CONCAT")}
    seen = Seen(on_epoch_end=lambda view: seen.found.append(dict(view.arrays)))
    options = {"device_budget_mb": 0} if stream else {}
    done = run(metrics=gather, callbacks=[seen], shuffle=False, epochs=1, **options)
    arrays = seen.found[0]
    np.testing.assert_array_equal(arrays["test_logits"]["label"], TEST[1])
    np.testing.assert_allclose(
        arrays["test_logits"]["out"], MODEL.apply(done.params, {}, TEST[0])[0], rtol=2e-4, atol=1e-5
    )
    np.testing.assert_array_equal(arrays["train_logits"]["label"], Y)
    assert not any("logits" in name for name in done.history[0])


def test_concat_needs_a_known_length():
    with pytest.raises(
        UserError, match="logits: CONCAT needs to know how many batches the train set has"
    ):
        fit(
            MODEL,
            Batches(),
            optimizer=adam(lr=0.01),
            metrics={"logits": tracked(loss_value, "CONCAT")},
        )


def test_validation_sets_have_names_and_hooks_and_come_before_the_test():
    calls = []
    hooks = ("on_validation_start", "on_validation_end", "on_test_start", "on_test_end")
    seen = Seen(
        **{
            hook: lambda view, hook=hook: calls.append((hook, list(view.evaluated)))
            for hook in hooks
        }
    )
    done = run(
        val={"val": VAL, "odd-ones": (X[1::2], Y[1::2])},
        callbacks=[seen],
        epochs=1,
        eval_initial=True,
    )
    both = ["val", "odd-ones"]
    once = [
        ("on_validation_start", []),
        ("on_validation_end", both),
        ("on_test_start", both),
        ("on_test_end", [*both, "test"]),
    ]
    assert calls == once * 2
    assert {"val_loss", "odd-ones_accuracy", "test_loss"} <= done.history[0].keys()
    with pytest.raises(UserError, match="cannot be called 'my_val'"):
        run(val={"my_val": VAL})


def test_the_initial_weights_are_measured_too(tmp_path):
    start = Seen(on_training_start=lambda view: start.found.append(view.params))
    run(tmp_path, callbacks=[start], eval_initial=True, epochs=1)
    first = rows(tmp_path)[0]
    out, _ = MODEL.apply(start.found[0], {}, TEST[0])
    assert (first["epoch"], first["step"], first["initial"]) == (0, 0, True)
    assert "test_loss" not in rows(tmp_path)[1]  # the first line within the epoch
    assert first["test_loss"] == pytest.approx(
        float(jax.vmap(cross_entropy)(out, TEST[1]).mean()), rel=1e-5
    )


def test_the_test_set_may_wait_for_the_best_checkpoint(tmp_path):
    checkpoint = {"monitor": "val_loss", "mode": "max", "keep": 1}  # an early one, then
    settings = {"val": VAL, "epochs": 4, "test_at": "end"}
    seen = Seen(
        on_test_end=lambda view: seen.found.append((view.metrics["test_loss"], view.params)),
        every_n_epochs=3,
    )
    done = run(tmp_path, checkpoint=checkpoint, callbacks=[seen], **settings)
    losses = [row["val_loss"] for row in done.history]
    best = 1 + int(np.argmax(losses))
    assert best < 4 and not any("test_loss" in row for row in done.history)
    final = rows(tmp_path)[-1]
    assert final["final"] == f"checkpoint-epoch_{best}"
    arrays, _ = storage.load(tmp_path / f"checkpoint-epoch_{best}.params")
    params = {"hidden": [{}], "head": {}}
    for name, array in arrays.items():
        if name.startswith("params/"):
            *way, leaf = name.split("/")[1:]
            (params["head"] if way == ["head"] else params["hidden"][0])[leaf] = array
    loss = jax.vmap(cross_entropy)(MODEL.apply(params, {}, TEST[0])[0], TEST[1]).mean()
    assert final["test_loss"] == pytest.approx(float(loss), rel=1e-4)
    ((told, weights),) = (
        seen.found
    )  # at the end, whatever the epoch, and with the weights that were tested
    assert told == final["test_loss"] and np.array_equal(
        weights["head"]["bias"], params["head"]["bias"]
    )
    assert done.metrics["test_loss"] == final["test_loss"]
    assert run(**settings).metrics["test_loss"] == pytest.approx(
        losses_of(run(**settings), TEST).mean(), rel=1e-4
    )  # no folder


def test_never_evaluated():
    done = run(eval_every=0)
    assert not any("test_loss" in row for row in done.history)


@pytest.mark.parametrize("stream", [False, True])
def test_a_few_batches_of_everything(stream):
    options = {"device_budget_mb": 0} if stream else {}
    labels = Seen(on_epoch_end=lambda view: labels.found.append(view.arrays["test_label"]))
    labels.metrics = {"label": tracked(lambda output, label: label, "CONCAT", phase="TEST")}
    done = run(limit_batches=2, callbacks=[labels], **options)
    assert done.step == 4
    np.testing.assert_array_equal(labels.found[0], TEST[1][:32])


@pytest.mark.parametrize("stream", [False, True])
def test_overfitting_sees_the_first_batches_alone(stream):
    seen = Seen(on_epoch_end=lambda view: seen.found.append(view.arrays["train_label"]))
    seen.metrics = {"label": tracked(lambda output, label: label, "CONCAT", phase="TRAIN")}
    run(overfit_batches=2, callbacks=[seen], device_budget_mb=0 if stream else 100)
    assert all(sorted(found) == sorted(Y[:32]) for found in seen.found) and len(seen.found) == 2


def test_overfitting_an_iterable_of_batches():
    assert fit(MODEL, Batches(), optimizer=adam(lr=0.01), epochs=3, overfit_batches=2).step == 6


def test_what_fails_in_an_evaluation_fails_before_the_first_step():
    def broken(output, label):
        return cross_entropy(output, label)

    broken.finish = lambda mean: 1 / 0
    started = Seen(on_epoch_start=lambda view: started.found.append(1))
    with pytest.raises(ZeroDivisionError):
        run(metrics=[tracked(broken, phase="TEST")], callbacks=[started])
    assert started.found == []


def test_a_callback_only_reads():
    def on_epoch_end(view):
        for name in ("epoch", "metrics", "anything"):
            with pytest.raises(AttributeError, match="only reads the run"):
                setattr(view, name, 3)
        with pytest.raises(TypeError):
            view.metrics["train_loss"] = 0.0
        with pytest.raises(TypeError):
            view.sets["train"] = None
        with pytest.raises(AttributeError, match="sees no 'runner'"):
            view.runner  # noqa: B018
        view.history[0]["train_loss"] = 0.0  # a copy
        return None

    done = run(callbacks=[Seen(on_epoch_end=on_epoch_end)], epochs=1)
    assert done.history[0]["train_loss"] > 0


def test_a_metric_of_a_callback_is_for_it_alone_and_must_have_a_name_of_its_own():
    seen = Seen(
        on_epoch_end=lambda view: seen.found.append(view.arrays["test_mine"]),
        metrics={"mine": tracked(loss_value, "MAX")},
    )
    done = run(callbacks=[seen], epochs=1)
    assert seen.found[0] == pytest.approx(losses_of(done, TEST).max(), rel=1e-4)
    assert not any("mine" in name for name in done.history[0])
    seen.metrics = {"accuracy": tracked(accuracy)}
    with pytest.raises(UserError, match="Seen measures 'accuracy', a name that another metric has"):
        run(callbacks=[seen])


@pytest.mark.parametrize(
    "settings",
    [{"callbacks": [early_stopping("val_loss")]}, {"checkpoint": {"monitor": "val_loss"}}],
)
def test_what_is_monitored_must_be_measured(tmp_path, settings):
    with pytest.raises(
        UserError,
        match=r"monitor: 'val_loss' is not measured; did you mean 'train_loss'\? \(train_loss, ",
    ):
        run(tmp_path, **settings)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_callback_is_called_at_the_steps_that_it_asks_for(tmp_path):
    at = (2, 5, 9)
    seen = Seen(on_step_end=lambda view: seen.found.append(view.step))
    seen.steps_left = lambda step: min([s - step for s in at if s > step], default=2**30)
    others = Seen(on_step_end=lambda view: others.found.append(view.step))
    asked = run(callbacks=[seen, others])
    assert seen.found == [2, 3, 5, 6, 9, 10, 13] and others.found == [3, 6, 10, 13]
    assert jax.tree.all(jax.tree.map(np.array_equal, asked.params, run().params))


def test_steps_one_by_one_for_a_callback_that_needs_them():
    seen = Seen(needs=("per_step", "gradient_norm"))
    seen.on_step_end = seen.on_epoch_end = lambda view: seen.found.append(
        {k: v.tolist() for k, v in view.per_step.items()}
    )
    run(callbacks=[seen])
    steps = [step for found in seen.found for step in found.get("step", [])]
    assert steps == list(range(1, 15))
    assert all(
        len(found["loss"]) == len(found["step"]) == len(found["gradient_norm"])
        for found in seen.found
        if found
    )
