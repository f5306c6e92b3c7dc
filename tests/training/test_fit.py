"""Whole runs of `fit`: exactness, determinism, one compilation, streaming, replicas, stopping."""

import base64
import os
import signal
import time
from collections import Counter

import jax
import numpy as np
import pytest

from data_loader.base import Arrays
from model.mlp import mlp
from model.resnet import resnet
from tests.runs import assert_same, json_lines
from tests.training.report.saved_run import Page
from training.base import tracked
from training.checkpoint.divergence import Diverged
from training.devices.options import MeshOptions
from training.devices.sharding import Plan
from training.engine import Replicas, Trainer
from training.feed import Resident, make_feeds
from training.fit import evaluate, fit, recipe_of
from training.observers import EVENTS
from training.optimizers import adam, sgd
from training.options import LoaderOptions
from training.report.page import write_report
from training.run import TIMES, Reader
from training.schedules import linear
from training.update import gradient_update
from training.watching.callbacks.early_stopping import early_stopping
from training.watching.pictures import png
from utils import UserError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 6)).astype(np.float32)
Y = (X[:, 0] + X[:, 1] > 0).astype(np.int32) + (X[:, 2] > 1)
MODEL = mlp((6,), 3, dims=(16,))
DEFAULTS = {"optimizer": adam(lr=0.01), "epochs": 2, "batch_size": 32, "log": {"every_steps": 5}}


def trainer_of(stacked=None, **settings):
    """A started Trainer on the data of this file, as `fit` makes it."""
    sets = {"train": Arrays(X, Y), "test": Arrays(X, Y)}
    recipe = recipe_of(MODEL, optimizer=adam(lr=0.01), batch_size=32, **settings)
    trainer = Trainer(recipe, sets, stacked)
    trainer.start()
    return trainer


class Streamed:
    """The same examples, one at a time, so that they cannot be resident on the device."""

    def __init__(self, x=X, y=Y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def run(train=(X, Y), test=None, model=MODEL, **settings):
    return fit(model, train, test, **DEFAULTS | settings)


def without_times(history):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in history]


def assert_close(a, b, rtol=1e-4, atol=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@pytest.mark.slow
def test_weights_are_evaluated_as_fit_evaluates_them():
    run = fit(MODEL, (X, Y), (X[:77], Y[:77]), **DEFAULTS)
    row, weights = run.history[-1], (MODEL, run.params, run.state)
    expected = {name: row[f"test_{name}"] for name in ("loss", "accuracy")}
    for data in ((X[:77], Y[:77]), Streamed(X[:77], Y[:77])):
        assert evaluate(*weights, data, batch_size=32) == expected
    halved = evaluate(*weights, (2 * X[:77], Y[:77]), preprocess=[lambda x: x / 2], metrics=[])
    assert halved == {"loss": pytest.approx(expected["loss"], rel=1e-6)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": (X[:, :3], Y)}, r"whose batches are \(float32\[128, 3\]"),
        ({"data": None}, "data: is None"),
        ({"data": X}, "data: is one array"),
        ({"model": mlp((6,), 3, dims=(7,))}, r"params: \w+/\w+ is \(16,?.*\), and \(7,?.*\) in"),
        ({"metrics": {"logits": lambda output, label: output}}, "metrics: logits ends with shape"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(change, message):
    params, state = MODEL.init(jax.random.key(0))
    arguments = {"model": MODEL, "params": params, "state": state, "data": (X, Y)} | change
    with pytest.raises(UserError, match=message):
        evaluate(**arguments)


@pytest.mark.slow
def test_inputs_may_be_nests_of_arrays():
    model = MODEL._replace(
        apply=lambda params, state, x, **k: MODEL.apply(params, state, x["a"] + x["b"], **k)
    )
    nested = run(({"a": X, "b": 0 * X}, Y), model=model)
    assert_same(nested.params, run().params)


@pytest.mark.slow
def test_it_learns_and_names_metrics_by_their_set():
    result = run(test=(X[:50], Y[:50]), val=(X[50:90], Y[50:90]), epochs=20)
    names = {f"{s}_{m}" for s in ("train", "val", "test") for m in ("loss", "accuracy")}
    assert names <= result.history[-1].keys()
    assert result.history[-1]["test_accuracy"] > 0.9
    assert result.step == 20 * 10


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not():
    first, second, other = run(test=(X, Y)), run(test=(X, Y)), run(test=(X, Y), seed=1)
    assert without_times(first.history) == without_times(second.history)
    assert_same(first.params, second.params)
    assert without_times(first.history) != without_times(other.history)


@pytest.mark.slow
def test_log_frequency_does_not_change_the_params():
    assert_same(run(log={"every_steps": 1}).params, run(log={"every_steps": 7}).params)


@pytest.mark.slow
def test_evaluation_is_exact_when_the_last_batch_is_not_full():
    result = run(test=(X[:77], Y[:77]))
    logits = np.asarray(MODEL.apply(result.params, {}, X[:77])[0], np.float64)
    by_hand = np.log(np.exp(logits).sum(1)) - logits[np.arange(77), Y[:77]]
    assert result.history[-1]["test_loss"] == pytest.approx(by_hand.mean(), rel=1e-5)
    assert result.history[-1]["test_accuracy"] == pytest.approx(
        (logits.argmax(1) == Y[:77]).mean(), rel=1e-6
    )


@pytest.mark.slow
def test_every_example_is_counted_once_per_epoch():
    result = run(metrics={"count": tracked(lambda output, target: 1.0, mode="SUM")})
    assert [row["train_count"] for row in result.history] == [300, 300]


@pytest.mark.slow
def test_each_seed_and_replica_draws_its_own_initial_weights():
    weights = [ts.params["hidden"][0]["weight"] for ts in trainer_of(replicas=3).replica_states()]
    other = trainer_of(seed=5).replica_states()[0].params["hidden"][0]["weight"]
    assert len({np.asarray(w).tobytes() for w in [*weights, other]}) == 4


@pytest.mark.slow
def test_the_state_is_donated():
    trainer = trainer_of()
    trainer.begin(1)
    before = jax.tree.leaves(trainer.states[0].params)
    trainer.train(1)
    assert all(leaf.is_deleted() for leaf in before)


@pytest.mark.slow
def test_params_read_in_a_hook_stay_valid_after_it():
    class Keep:
        def on_row(self, run, row):
            self.best = run.params if run.epoch == 1 else self.best

    keep = Keep()
    last = run(callbacks=[keep]).params
    assert np.isfinite(keep.best["head"]["bias"]).all()
    assert np.any(keep.best["head"]["bias"] != last["head"]["bias"])


def test_the_device_budget_decides_which_sets_are_resident():
    half = X.nbytes + Y.nbytes + 1000

    def resident(budget):
        options = LoaderOptions(batch_size=30)
        object.__setattr__(options, "device_budget_mb", budget / 2**20)
        replicas = Replicas([0], Plan.on_paper(MeshOptions(), None))
        feeds = make_feeds({"train": Arrays(X, Y), "test": Arrays(X, Y)}, options, replicas)
        for feed in feeds.values():
            feed.close()
        return [type(feed) is Resident for feed in feeds.values()]

    assert resident(0) == [False, False]
    assert resident(half) == [True, False]  # only one of the two fits
    assert resident(2 * half) == [True, True]


def test_a_test_set_of_another_shape_is_an_error_before_the_first_epoch():
    with pytest.raises(UserError, match=r"the test set is .*float32\[5\]"):
        run(test=(X[:, :5], Y))


@pytest.mark.slow
def test_step_hooks_see_the_exact_step_and_change_the_next_one():
    class Halve:
        def on_steps(self, run):
            time.sleep(0.01 * (run.step % 3))  # timing must not matter
            seen.append((run.step, int(run.states()[0].step)))
            return {"lr_scale": 0.5}

    seen = []
    first = run(callbacks=[Halve()]).params
    assert [a for a, _ in seen] == [b for _, b in seen] == [5, 10, 15, 20]
    assert_same(first, run(callbacks=[Halve()]).params)


@pytest.mark.slow
def test_a_whole_run_compiles_each_program_once(compilations):
    run(test=(X, Y), epochs=4, log={"every_steps": 1})
    assert compilations.pop("jit(loop)") == 2  # training and evaluation
    compilations.pop("jit(init)", None)  # may be cached from an earlier run
    assert set(compilations.values()) == {1}


@pytest.fixture
def compilations():
    """{function name: how many times it was compiled}"""
    seen = Counter()

    def listen(event, _seconds, fun_name=None, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen[fun_name] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_another_shape_is_an_error_not_a_second_compilation():
    trainer = trainer_of()
    trainer.begin(1)
    trainer.train(1)
    feed = trainer.feeds["train"]
    feed.data = jax.tree.map(lambda a: a[:100], feed.data)
    with pytest.raises(
        UserError,
        match=r"training step: it was compiled for data x float32\[300,6\], "
        r"and was now given float32\[100,6\]",
    ):
        trainer.train(1)


@pytest.mark.slow
def test_streamed_batches_train_like_resident_ones():
    assert_close(run(Streamed()).params, run().params)
    assert_close(run(device_budget_mb=0).params, run().params)


@pytest.mark.slow
def test_any_iterable_of_batches_works_and_a_short_last_batch_counts_by_its_examples():
    class Batches:  # like a PyTorch DataLoader, without __getitem__
        def __iter__(self):
            return ((X[i : i + 32], Y[i : i + 32]) for i in range(0, 300, 32))

    result = run(Batches(), test=Batches(), epochs=1)
    assert_close(result.params, run(shuffle=False, epochs=1).params)
    logits = np.asarray(MODEL.apply(result.params, {}, X)[0])
    assert result.history[-1]["test_accuracy"] == pytest.approx(
        (logits.argmax(1) == Y).mean(), rel=1e-6
    )


@pytest.mark.slow
def test_a_loader_may_reuse_its_buffer_while_batches_are_read_ahead():
    class OneBuffer:
        def __init__(self, copied):
            self.copied = copied

        def __iter__(self):
            buffer = np.empty(32 * 6 * 4 + 64, np.uint8)
            offset = -buffer.ctypes.data % 64  # aligned, so that a device may use it uncopied
            x = buffer[offset : offset + 32 * 6 * 4].view(np.float32).reshape(32, 6)
            for i in range(0, 288, 32):
                x[:] = X[i : i + 32]
                yield (x.copy() if self.copied else x), Y[i : i + 32]

    reused, copied = run(OneBuffer(copied=False)), run(OneBuffer(copied=True))
    assert without_times(reused.history) == without_times(copied.history)


def test_the_length_of_a_loader_may_be_unknown():
    class Unsized:  # like a PyTorch DataLoader over an IterableDataset
        def __len__(self):
            raise TypeError("no length")

        def __getitem__(self, index):
            raise TypeError("no items")

        def __iter__(self):
            return ((X[i : i + 32], Y[i : i + 32]) for i in range(0, 288, 32))

    assert run(Unsized(), epochs=2).step == 18


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dataset", "batches", "loader"])
def test_what_grain_makes_is_data(kind):
    grain = pytest.importorskip("grain", reason="another library's loader")
    pairs = list(zip(X, Y, strict=True))
    data = grain.MapDataset.source(pairs)
    if kind == "batches":
        data = data.batch(32).to_iter_dataset()
    if kind == "loader":
        sampler, batches_of_32 = grain.samplers.SequentialSampler(300), grain.transforms.Batch(32)
        data = grain.DataLoader(data_source=pairs, sampler=sampler, operations=[batches_of_32])
    expected = run(shuffle=False, epochs=1)
    assert_close(run(data, test=data, shuffle=False, epochs=1).params, expected.params)


@pytest.mark.slow
def test_metrics_may_be_dicts_of_dicts():
    def sides(output, target):
        return {"left": {"mean": output[0]}, "right": output[1]}

    row = run(metrics=[sides], epochs=1).history[0]
    assert {"train_sides_left_mean", "train_sides_right"} <= row.keys()
    with pytest.raises(UserError, match="'a/b' is taken, or has a '/'"):
        run(metrics={"a/b": sides})


@pytest.mark.slow
def test_a_generator_is_refused_unless_it_is_read_once():
    def generator():
        return ((X[i : i + 32], Y[i : i + 32]) for i in range(0, 288, 32))

    with pytest.raises(UserError, match=r"^train: is an iterator, .* epochs is 2; pass an object"):
        run(generator())
    with pytest.raises(UserError, match=r"^test: is an iterator, .*a held-out set is read"):
        run(test=generator(), epochs=1)
    assert run(generator(), epochs=1).step == 9
    assert run(generator(), max_steps=4).step == 4


@pytest.mark.parametrize("name", ["train", "test"])
@pytest.mark.parametrize(("end", "fix"), [(300, "np.concatenate.$"), (288, "stack them")])
def test_a_list_of_batches_is_refused_since_a_list_is_read_as_examples(name, end, fix):
    batches = [(X[i : i + 32], Y[i : i + 32]) for i in range(0, end, 32)]
    with pytest.raises(UserError, match=rf"^{name}: looks like a list of \d+ batches.*{fix}"):
        run(**{name: batches})


@pytest.mark.slow
def test_a_custom_collate_fn_makes_the_batches():
    def double(examples):
        x, y = zip(*examples, strict=True)
        return np.stack(x) * 2, np.stack(y)

    assert_close(run(Streamed(), collate_fn=double).params, run((X * 2, Y)).params)
    assert_close(run(collate_fn=double).params, run((X * 2, Y)).params)


@pytest.mark.slow
def test_errors_of_the_reading_thread_are_raised_in_the_caller():
    class Broken(Streamed):
        def __getitem__(self, i):
            if i == 77:
                raise OSError("disk on fire")
            return super().__getitem__(i)

    with pytest.raises(UserError, match=r"example 77 of Broken .*OSError: disk on fire"):
        run(Broken())


@pytest.mark.slow
def test_a_validation_split_is_held_out():
    result = run(val_size=0.2)
    assert "val_loss" in result.history[-1]
    assert result.step == 2 * 8  # 240 examples in batches of 32
    assert without_times(result.history) == without_times(run(val_size=60).history)
    other_split = run(val_size=60, split_seed=1)
    assert without_times(result.history) != without_times(other_split.history)
    with pytest.raises(UserError, match="brings its own validation set"):
        run(val=(X, Y), val_size=60)
    with pytest.raises(UserError, match="an iterable of batches cannot be split"):
        run(iter([]), val_size=60)


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_each_replica_equals_a_run_of_its_own(streamed):
    data = Streamed() if streamed else (X, Y)
    both = run(data, test=(X, Y), replicas=2)
    singles = [run(data, test=(X, Y), seed=seed) for seed in (0, 1)]
    for r, single in enumerate(singles):
        assert_same(both.states()[r].params, single.params)
        assert both.history[-1][f"test_loss/{r}"] == single.history[-1]["test_loss"]
    mean = np.mean([s.history[-1]["test_loss"] for s in singles])
    assert both.history[-1]["test_loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.slow
def test_replicas_in_one_vmapped_program_as_on_accelerators():
    """The vmapped program, which a run on the CPU does not use by default."""
    trainer = trainer_of(replicas=2, stacked=True)
    trainer.begin(1)
    taken, reports = trainer.train(100)
    assert taken == 10
    assert len(trainer.read(reports)) == 2
    singles = [run(seed=seed, epochs=1, test=(X, Y)) for seed in (0, 1)]
    losses = [Reader().values("test", [tally])["test_loss"] for tally in trainer.evaluate("test")]
    for r, single in enumerate(singles):
        assert_close(trainer.replica_states()[r].params, single.params)
        assert losses[r] == pytest.approx(single.history[-1]["test_loss"], rel=1e-4)


@pytest.mark.slow
def test_dense_convolutions_run_outside_the_loop_on_the_cpu_with_the_same_result():
    x, y = RNG.normal(size=(24, 8, 8, 1)).astype(np.float32), np.arange(24, dtype=np.int32) % 3
    model = resnet((8, 8, 1), 3, widths=(4,), depth=1)
    settings = {"optimizer": sgd(lr=0.01), "batch_size": 8, "epochs": 1}
    result = fit(model, (x, y), **settings)
    assert not result.trainer.looped
    assert run(epochs=1).trainer.looped
    streamed = fit(model, Streamed(x, y), **settings)
    assert_close(result.state, streamed.state)


@pytest.mark.slow
def test_averaged_params_are_evaluated_and_returned():
    result = run(test=(X, Y), ema=0.9)
    logits = np.asarray(MODEL.apply(result.params, {}, X)[0])
    assert_same(result.params, result.states()[0].ema)
    assert result.history[-1]["test_accuracy"] == pytest.approx(
        (logits.argmax(1) == Y).mean(), rel=1e-6
    )


@pytest.mark.slow
def test_a_schedule_multiplies_the_learning_rate():
    rate_zero_after_two = run(schedule=linear(steps=2), epochs=1)
    assert_same(rate_zero_after_two.params, run(schedule=linear(steps=2), epochs=2).params)


@pytest.mark.slow
def test_a_label_outside_the_classes_stops_the_run():
    y = Y.copy()
    y[5] = 3
    with pytest.raises(Diverged):
        run((X, y))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_chunk_in_progress(number):
    class Kill:
        def on_steps(self, run):
            if run.step >= 15 and not run.signal:
                os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    result = run(callbacks=[Kill()], epochs=100)
    assert result.signal == number.name
    assert 15 <= result.step < 40 and result.metrics == {}
    assert signal.getsignal(number) is before


@pytest.mark.slow
def test_callbacks_are_called_in_order_and_can_stop_the_run_or_scale_the_learning_rate():
    calls = []

    class Watch:
        every = None

        def __getattr__(self, name):
            if name not in EVENTS:
                raise AttributeError(name)

            def call(run, *details):
                calls.append(name)
                if name == "on_row" and calls.count("on_row") == 3:
                    return {"stop": True}

            return call

        def __dir__(self):
            return EVENTS

    result = run(callbacks=[Watch()], epochs=10, log={"every_steps": 100})
    assert result.epoch == 3
    in_epochs = [name for name in calls if name not in ("on_batch", "on_steps", "on_save")]
    assert in_epochs == ["on_start", *["on_evaluated", "on_row"] * 3, "on_end"]

    class Freeze:
        def on_start(self, run):
            return {"lr_scale": 0.0}

    assert_same(
        run(callbacks=[Freeze()], epochs=1).params, run(callbacks=[Freeze()], epochs=2).params
    )


@pytest.mark.slow
@pytest.mark.parametrize("ema", [None, 0.5])
def test_callbacks_apply_the_model_that_is_evaluated(ema, tmp_path):
    outputs = []

    class Sample:
        def on_row(self, view, row):
            raw, taken = view.predict(X), view.apply(X / 2 + 1)
            outputs.append((view.params, raw, taken, view.model))
            view.publish.image(view.step, "samples/a", np.full((2, 3), view.epoch, np.uint8))

    half = lambda x: x / 2 + 1  # noqa: E731
    settings = {"preprocess": [half], "callbacks": [Sample()], "folder": tmp_path, "ema": ema}
    result = run(**settings, epochs=3)
    for params, raw, taken, model in outputs:
        expected = MODEL.apply(params, {}, X / 2 + 1)[0]
        assert_close([raw, taken], [expected, expected])
        assert model is MODEL
    assert_same(outputs[-1][0], result.params)
    assert np.any(outputs[0][1] != outputs[-1][1])
    newest = png(np.full((2, 3), 3, np.uint8))  # without any tracker
    assert [file.read_bytes() for file in (tmp_path / "pictures").iterdir()] == [newest]
    [shown] = Page(write_report(tmp_path)).all("img")
    assert shown[1]["alt"] == "samples/a"
    assert base64.b64decode(shown[1]["src"].partition(",")[2]) == newest


class Auc:
    """Reports a value of its own after each evaluation: these numbers, one for each epoch."""

    reports = ("val_auc",)

    def __init__(self, *values, **attributes):
        self.values = values
        vars(self).update(attributes)

    def on_evaluated(self, view, name, values):
        value = self.values[view.epoch - 1] if name == "val" else None
        return None if value is None else {"values": {"val_auc": np.float32(value)}}


@pytest.mark.slow
@pytest.mark.parametrize("order", [1, -1])
def test_a_value_of_a_callback_can_stop_the_run_and_choose_the_best_checkpoint(order, tmp_path):
    stop = early_stopping(monitor="val_auc", patience=2)
    settings = {"val": (X, Y), "folder": tmp_path, "epochs": 9, "checkpoint": {"keep": 1}}
    settings["checkpoint"] |= {"monitor": "val_auc"}
    result = run(callbacks=[Auc(0.5, 0.75, 0.25, 0.625), stop][::order], **settings)
    assert result.completed == 4 and result.history[1]["val_auc"] == 0.75
    assert {path.name for path in tmp_path.glob("*.params")} == {
        "checkpoint-epoch_2.params",
        "checkpoint-epoch_4.params",
    }


@pytest.mark.slow
def test_a_custom_update_gets_only_the_options_that_it_names():
    def backwards(objective, optimizer):
        plain = gradient_update(objective, optimizer)
        return plain._replace(
            step=lambda ts, batch, valid: plain.step(
                ts._replace(lr_scale=-ts.lr_scale), batch, valid
            )
        )

    result = run(update=backwards, epochs=1)
    assert result.history[-1]["train_loss"] > run(epochs=1).history[-1]["train_loss"]
    with pytest.raises(UserError, match=r"training.ema: the update 'backwards' takes no 'ema'"):
        run(update=backwards, ema=0.9)


@pytest.mark.slow
def test_the_finish_of_a_plain_objective_function_names_its_metrics():
    def factory(model, loss, metrics, preprocess, augment):
        def objective(params, state, batch, key, train):
            output, state = model.apply(params, state, batch[0], train=train, key=key)
            error = np.float32(0) + output.sum(axis=1) ** 2
            return error, state, {"error": error}

        objective.finish = lambda means: {"root": means["error"] ** 0.5}
        return objective

    row = run(objective=factory).history[-1]
    assert row["train_root"] == pytest.approx(row["train_loss"] ** 0.5, rel=1e-5)


def test_an_empty_dataset_is_an_error():
    with pytest.raises(UserError, match="empty"):
        run((X[:0], Y[:0]))


def trees_of(run):
    return jax.tree.map(np.asarray, run.states())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"replicas": 2}], ids=str)
def test_max_steps_ends_a_run_at_that_step_and_a_larger_budget_continues_it(tmp_path, settings):
    settings = DEFAULTS | settings
    whole = fit(MODEL, (X, Y), (X, Y), **settings)
    part = fit(MODEL, (X, Y), (X, Y), folder=tmp_path, max_steps=13, **settings)
    assert (part.step, part.completed, part.stopped_by) == (13, 1, "training.max_steps")
    assert {"train_loss", "test_loss"} <= part.metrics.keys()
    rows = json_lines(tmp_path / "metrics.jsonl")
    assert rows[-1]["final"] == "the last weights" and rows[-1]["step"] == 13
    weights = fit(MODEL, (X, Y), folder=tmp_path, max_steps=13, resume="override", **settings)
    assert_same(weights.params, part.params)
    again = fit(MODEL, (X, Y), (X, Y), folder=tmp_path, resume="override", **settings)
    assert_same(trees_of(again), trees_of(whole))
    assert [r["test_loss"] for r in again.history] == [r["test_loss"] for r in whole.history]
    logged = json_lines(tmp_path / "metrics.jsonl")
    assert not [row for row in logged if row.get("final")]


def test_a_run_without_epochs_needs_another_limit():
    with pytest.raises(UserError, match="epochs: is null, so a limit must end the run; set max_st"):
        fit(MODEL, (X, Y), **DEFAULTS | {"epochs": None})


@pytest.mark.slow
def test_max_seconds_ends_a_run_which_a_larger_budget_continues(tmp_path):
    part = fit(MODEL, (X, Y), (X, Y), folder=tmp_path, **{**DEFAULTS, "max_seconds": 1e-6})
    assert part.stopped_by == "training.max_seconds (1e-06 s)"
    assert part.step < 20
    again = fit(MODEL, (X, Y), (X, Y), folder=tmp_path, resume=True, **DEFAULTS)
    assert_same(trees_of(again), trees_of(fit(MODEL, (X, Y), (X, Y), **DEFAULTS)))
