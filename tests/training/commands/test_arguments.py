"""The arguments of `fit`: its signature, and the messages for what cannot be meant."""

import inspect
import logging
from dataclasses import fields
from typing import Never, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from scipy.sparse import csr_matrix

from data_loader.digits import digits
from model.convnext import convnext
from model.layers.linear import linear as linear_layer
from model.mlp import mlp
from model.resnet import resnet
from training.base import Weighted
from training.commands.start import checked_recipe
from training.fit import fit
from training.loss import cross_entropy, mse
from training.metrics import accuracy, mae
from training.objective import denoising, supervised
from training.optimizers import adam, sgd
from training.options import LoaderOptions, TrainingOptions
from training.preprocess import to_unit
from training.schedules import linear
from training.transforms import clip_by_global_norm
from training.update import gradient_update
from training.watching.callbacks.early_stopping import early_stopping
from utils import UserError
from wiring.build import build

# The check of our own shapes would come before these messages.
pytestmark = pytest.mark.usefixtures("without_shape_checks")

X = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)
MODEL = mlp((6,), 2, dims=(4,))
CONFIG = {
    "model": {"name": "mlp", "args": {"dims": [4]}},
    "data": {"name": "digits", "args": {"train_size": 64, "test_size": 64}},
    "loss": "cross_entropy",
    "preprocess": ["to_unit"],
    "optimizer": {"name": "sgd", "args": {"lr": 0.1}},
}


def run(train=(X, Y), test=None, model=MODEL, **settings):
    return fit(model, train, test, **{"optimizer": adam(), "epochs": 1, **settings})


def test_every_option_is_an_argument_with_its_type_and_default():
    parameters = inspect.signature(fit).parameters
    for options in (LoaderOptions, TrainingOptions):
        types = get_type_hints(options)  # without their ranges
        for field in [each for each in fields(options) if each.name != "vary"]:
            parameter, name = parameters[field.name], field.name
            assert parameter.default == field.default, name
            assert parameter.annotation == types[name] or "collate_fn" in name, name
    assert all(p.annotation is not p.empty for p in parameters.values())
    assert parameters["unknown"].annotation is Never  # so that an editor marks other names


@pytest.mark.parametrize(
    ("name", "suggested"),
    [("epocs", "epochs"), ("batchsize", "batch_size"), ("call_backs", "callbacks")],
)
def test_a_misspelled_argument_suggests_the_right_one(name, suggested):
    message = f"unexpected keyword argument '{name}'; did you mean '{suggested}'"
    with pytest.raises(TypeError, match=message):
        run(**{name: 3})


class OfLinen(linen.Module):
    pass


class Tensor:
    """As a tensor of PyTorch that requires its gradient."""

    requires_grad = True


IMAGE_MODEL, BYTES = convnext((8, 8, 3), 2, dims=(4,)), (np.zeros((64, 8, 8, 3), np.uint8), Y)


def smooth(scale):
    return lambda step: 1 / (1 + scale * step)


MISTAKES = {
    "a name": ({"optimizer": "sgd"}, "from training.optimizers import sgd, then sgd\\(lr\\)"),
    "a wrong name": (
        {"optimizer": "adm"},
        r"'adm' is only a name \(did you mean 'adam'\?\); pass the object",
    ),
    "a node of a config": ({"optimizer": {"name": "muon"}}, "'muon' is only a name"),
    "a factory": ({"optimizer": sgd}, r"optimizer: sgd is a function .* call it: sgd\("),
    "a factory of Optax": ({"optimizer": optax.lion}, r"lion .* call it: lion\(learning_rate\)"),
    "a class": ({"optimizer": LoaderOptions}, "call it: LoaderOptions"),
    "a list": ({"optimizer": [clip_by_global_norm(1.0), sgd(lr=1.0)]}, "chain them: chain"),
    "a number": ({"optimizer": 0.1}, "optimizer: float has no init and update"),
    "a loss by name": ({"loss": "huber"}, "from training.loss import huber, then huber"),
    "a loss of None": ({"loss": 3}, "loss: 3 is not a function"),
    "one metric": ({"metrics": accuracy}, r"metrics: must be a list, .*: \[accuracy\]"),
    "a metric by name": ({"metrics": {"m": "rmse"}}, "from training.metrics import rmse"),
    "one preprocess": ({"preprocess": to_unit}, r"must be a list, .*: \[to_unit\]"),
    "a preprocess by name": ({"preprocess": ["normalize"]}, "training.preprocess import normalize"),
    "an augment": ({"augment": [None]}, "augment: None is not a function"),
    "a schedule by name": ({"schedule": "cosine"}, "import cosine, then cosine"),
    "a schedule's factory": ({"schedule": linear}, r"linear is a function .* call it: linear\("),
    "one of one's own": ({"schedule": smooth}, r"schedule: smooth is .* call it: smooth\(scale\)"),
    "one of vectors": ({"schedule": lambda step: X}, "schedule: must return one number for a"),
    "one of rates": ({"schedule": lambda step: 5.0}, "returns 5 for the first step; it multiplies"),
    "one below 0": (
        {"schedule": lambda step: step - 1.0},
        "returns -1 for the first step; it mult",
    ),
    "a schedule of two": ({"schedule": lambda a, b: a}, "schedule: <lambda> is a function"),
    "an objective": ({"objective": "mixup"}, "from training.objective import mixup"),
    "an update": ({"update": "gradient_update"}, "from training.update import gradient_update"),
    "one callback": ({"callbacks": early_stopping(monitor="x")}, "callbacks: must be a list"),
    "a callback's factory": ({"callbacks": [early_stopping]}, r"call it: early_stopping\("),
    "a callback by name": ({"callbacks": ["profiler"]}, "callbacks.profiler import profiler"),
    "no callback's name": (
        {"callbacks": ["early"]},
        "and no part's: .*early_stopping",
    ),
    "a tracker by name": ({"log": {"trackers": ["jsonl"]}}, "trackers.jsonl import jsonl"),
    "a key of log": (
        {"log": {"every_step": 3}},
        "no such key 'every_step'; did you mean 'every_st",
    ),
    "no dict": ({"checkpoint": True}, "checkpoint: must be a dict of dir, .*got True"),
    "a bad value": ({"checkpoint": {"keep": 0}}, "checkpoint.keep: must be at least 1, got 0"),
    "a seed": ({"seed": "0"}, 'seed: must be an integer, found "0"'),
    "a sharding": ({"sharding": "fsp"}, 'sharding: must be .*, found "fsp"'),
    "a set of another name": ({"val": {"my_val": (X, Y)}}, "data: a validation set cannot be call"),
    "a second training set": ({"val": {"train": (X, Y)}}, "data: a validation set cannot be call"),
    "a metric twice": ({"metrics": [accuracy] * 2}, r"metrics\.1: the name 'accuracy' is taken"),
    "a rollback without the optimizer's state": (
        {"on_nonfinite": "rollback", "checkpoint": {"save_optimizer_state": False}},
        "training.on_nonfinite: 'rollback' needs complete checkpoints",
    ),
    "resume": ({"resume": "auto"}, 'resume: must be False, True or "override"'),
    "the config": ({"config": LoaderOptions()}, r"must be a dict, got LoaderOptions; pass vars"),
    "the config's seed": ({"config": {"seed": 4}}, r"config: 'seed' is the run's own, 0; pass the"),
    "a model by name": ({"model": "resnet"}, "model: 'resnet' is only a name"),
    "a model's factory": ({"model": resnet}, r"call it: resnet\(input_shape, num_classes\)"),
    "no model": ({"model": np.tanh(X)}, "ndarray has no init and apply"),
    "a list of lists": ({"train": (X.tolist(), Y)}, r"train: x is a list; .* np.asarray\(x\)"),
    "a list of labels": ({"train": (X, Y.tolist())}, r"train: y is a list; .* np.asarray\(y\)"),
    "lists of a test set": ({"test": ({"a": [1.0, 2.0]}, Y)}, "test: x is a list"),
    "a list of examples": ({"train": (list(X), Y)}, r"a list of 64 arrays; .* np.stack\(x\)"),
    "text": ({"train": (X, Y.astype(str))}, "train: y holds <U11, not numbers"),
    "a masked array": ({"train": (np.ma.masked_less(X, 0), Y)}, r"train: x is a masked .*filled"),
    "one in a dataset": (
        {"train": [(np.ma.masked_less(X[0], 0), 1)]},
        "train: an example: 0 is a m",
    ),
    "one in a batch": ({"train": iter([(np.ma.masked_less(X, 0), Y)])}, "batch 0: 0 is a masked"),
    "another byte order": (
        {"train": (X.astype(">f4"), Y)},
        r"train: x holds >f4, which JAX cannot read; pass .astype\('float32'\)",
    ),
    "in a batch": ({"train": iter([(X, Y.astype(">i4"))])}, "batch 0: 1 holds >i4"),
    "text in a batch": (
        {"train": iter([(X, Y.astype(str))])},
        "batch 0: 1 holds <U11, not numbers",
    ),
    "a tensor": ({"train": (Tensor(), Y)}, r"train: x is a tensor .*; pass .detach\(\)"),
    "dates": (
        {"train": (X.astype("M8[s]"), Y)},
        "x holds datetime64.*, not numbers; pass the days",
    ),
    "objects": ({"train": (X, Y.astype(object))}, r"y holds object, .*; pass y.astype\(int\)$"),
    "objects that are floats": ({"train": (X.astype(object), Y)}, r"; pass x.astype\(float\)$"),
    "a sparse matrix": ({"train": (csr_matrix(X), Y)}, r"x holds object, .*; pass x.toarray\(\)"),
    "large integers": ({"train": ((X * 1e12).astype(int), Y)}, "train: x holds the integer -"),
    "bytes": ({"model": IMAGE_MODEL, "train": BYTES}, "to_unit makes floats of images that are by"),
    "bytes with noise": (
        {"model": mlp((8, 8, 3), 192), "train": BYTES, "objective": denoising, "loss": mse},
        "to_unit makes floats",
    ),
    "a dict for a model of arrays": (
        {"train": ({"a": X, "b": X}, Y)},
        "x is a dict of a, b: use a model, or a preprocess, that takes one",
    ),
    "a single array": ({"train": X, "test": Y}, r"train: is one array, float32\[64, 6\]"),
    "three": ({"train": (X, Y, Y)}, "train: is a tuple of 3"),
    "a dict": ({"train": {"x": X, "y": Y}}, "train: is a dict of x, y"),
    "a Data": ({"train": digits(train_size=8, test_size=8)}, r"sets = data.load\(\)"),
    "a dataset by name": ({"train": "mnist"}, "train: 'mnist' holds no examples"),
    "a dataset's factory": ({"train": digits}, "holds no examples"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_for(mistake):
    settings, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        run(**settings)


def test_the_columns_of_a_table_that_are_no_numbers_are_named():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": X[:, 0], "b": "name", "c": pandas.Timestamp("2020-01-01")})
    with pytest.raises(UserError, match=r"drop or encode the columns b \(\w+\), c \(datetime64"):
        run((table, Y))


@pytest.mark.slow
def test_partials_optax_and_lists_of_inputs_are_no_mistakes():
    two = MODEL._replace(apply=lambda p, s, x, **k: MODEL.apply(p, s, x[0] + x[1], **k))
    optimizer = optax.adam(optax.cosine_decay_schedule(0.01, 10))
    done = run(([X, X], Y), model=two, optimizer=optimizer, schedule=linear(steps=9))
    assert done.completed == 1
    targets = X[:, :2].copy()
    assert "train_mae" in run((X, targets), loss=mse, metrics=[mae]).metrics


@pytest.mark.slow
def test_the_config_reaches_trackers_callbacks_and_a_resumed_run(tmp_path, caplog):
    class Seen:
        def start(self, about):
            self.about = about

        def on_start(self, view):
            self.config = view.config

    seen = Seen()
    config = {"title": "widths", "width": 4, "dirs": ["a"]}
    settings = {"config": config, "folder": tmp_path, "callbacks": [seen]}
    run(**settings, log={"trackers": [seen]})
    for reached in (seen.about.config, seen.config):
        assert config.items() <= reached.items()
        assert reached["loader"]["batch_size"] == 128 and reached["seed"] == 0
    assert seen.about.title == "widths"
    with pytest.raises(UserError, match=r"width: 4 -> 8"):
        run(**settings | {"config": config | {"width": 8}}, resume=True)


@pytest.mark.slow
def test_a_cell_that_runs_again_says_what_to_do(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run(folder=tmp_path, epochs=2)
    message = r"holds a run of 2 epochs already, .*resume=True.*another folder.*shutil.rmtree\('"
    with pytest.raises(UserError, match=message):
        run(folder=tmp_path, epochs=2)
    again = run(folder=tmp_path, epochs=2, resume=True)
    assert again.step == 2 and len(again.history) == 2
    assert "has completed its 2 epochs: nothing is trained; raise `epochs`" in caplog.text
    assert run(folder=tmp_path, epochs=3, resume=True).step == 3
    assert "resuming after step 2" in caplog.text


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another_in_memory_or_in_a_file(tmp_path):
    first = run(folder=tmp_path, epochs=10)
    with pytest.raises(UserError, match=r"run's folder; .* the newest, .*/checkpoint-epoch_10.pa"):
        run(pretrained=str(tmp_path))
    from_file = run(pretrained=tmp_path / "checkpoint-epoch_10.params")
    with pytest.raises(UserError, match=r"pretrained: .*_replace\(init=lambda key: \(run.params"):
        run(pretrained=first.params)
    in_memory = run(model=MODEL._replace(init=lambda key: (first.params, first.state)))
    jax.tree.map(np.testing.assert_array_equal, in_memory.params, from_file.params)


@pytest.mark.slow
def test_a_run_is_shown_in_one_line():
    def many(output, target):
        return {f"part_{i}": output[0] for i in range(30)}

    shown = repr(run(test=(X, Y), metrics=[accuracy, many], replicas=2, epochs=2))
    assert shown.startswith("Run(2 of 2 epochs, step 2, test_loss 0.")
    assert "test_accuracy" in shown and "\n" not in shown and len(shown) < 160


def one_number(model, loss, metrics, preprocess, augment):
    plain = supervised(model, loss, metrics, preprocess, augment)

    def objective(*arguments):
        losses, state, _ = plain(*arguments)
        return losses.mean(), state, {}

    return objective


def two_values(model, loss, metrics, preprocess, augment):
    return lambda *arguments: supervised(model, loss, {}, (), ())(*arguments)[:2]


def other_names(model, loss, metrics, preprocess, augment):
    plain = supervised(model, loss, {}, (), ())

    def objective(params, state, batch, key, train):
        losses, state, _ = plain(params, state, batch, key, train)
        return losses, state, {"noisy" if train else "clean": losses}

    return objective


def with_aux(model, loss, metrics, preprocess, augment):
    plain = supervised(model, loss, {}, (), ())

    def objective(params, state, batch, key, train):
        losses, state, _ = plain(params, state, batch, key, train)
        return (losses, losses), state, {}

    return objective


def of_loss_alone(model, loss):
    return supervised(model, loss, {}, (), ())


def without_key(model, loss, metrics, preprocess, augment):
    return lambda params, state, batch: None


def model_of(apply):
    return MODEL._replace(apply=apply)


def noisy(params, state, x, *, train=False, key=None):
    output, state = MODEL.apply(params, state, x)
    return output * jax.random.bernoulli(key, 0.5, output.shape), state


def too_wide(params, state, x, *, train=False, key=None):
    wide = jnp.concatenate([x, x], axis=1)
    return linear_layer({"weight": jnp.zeros((6, 2)), "bias": jnp.zeros(2)}, wide), state


def label_text(output, target):
    return "right"


def mistakes(output, target):
    return (output.argmax() != target).astype(int)


class NoView:
    def on_steps(self):
        pass


DOES_NOT_FIT = {
    "an output without the state": (
        {"model": model_of(lambda p, s, x, *, train, key: MODEL.apply(p, s, x)[0])},
        r"model: apply must return \(output, state\)",
    ),
    "an apply without a key": (
        {"model": model_of(lambda params, state, x: MODEL.apply(params, state, x))},
        r"model: apply\(params, state, x\) must take \(params, state, x, \*, train=False, key=None",
    ),
    "random in an evaluation": (
        {"model": model_of(noisy)},
        r"in an evaluation \(train=False; .*test_arguments.py, line \d+, in noisy: ",
    ),
    "wrong shapes": (
        {"model": model_of(too_wide)},
        r"model/layers/linear.py, line \d+, in \w+, called from .*arguments.py, line \d+, in too_w",
    ),
    "a metric that is text": ({"metrics": [label_text]}, "in the metric label_text: .*TypeError"),
    "a loss with aux": (
        {"loss": lambda output, target: (cross_entropy(output, target), 100.0)},
        "^loss: is a tuple of 2 values; return a number, a Weighted",
    ),
    "a term that is a list": (
        {"loss": lambda output, target: {"a": list(output)}},
        "loss: a: is a list of 2 values",
    ),
    "a weighted pair": (
        {"loss": lambda output, target: Weighted((output[0], output[1]), 1.0)},
        "loss: is a tuple of 2 values",
    ),
    "a metric of two": (
        {"metrics": {"pair": lambda output, target: (output[0], output[1])}},
        "metric pair: is a tuple of 2 values",
    ),
    "an objective with aux": (
        {"objective": with_aux},
        "objective: the loss: is a tuple of 2 values",
    ),
    "a loss of integers": ({"loss": mistakes}, "loss: is int32, from which nothing can be learned"),
    "other metrics in evaluations": (
        {"objective": other_names},
        r"training \(noisy float32\[128\]\) and evaluation \(clean float32\[128\]\) differ",
    ),
    "an objective of two": (
        {"objective": of_loss_alone},
        r"objective: of_loss_alone\(model, loss\) must take \(model, loss, metrics, preprocess",
    ),
    "its function of three": (
        {"objective": without_key},
        r"objective: its function: .* must take \(params, state, batch, key, train\)",
    ),
}


@pytest.mark.parametrize("case", DOES_NOT_FIT)
def test_a_part_that_does_not_fit_is_named_with_the_users_line(case):
    settings, message = DOES_NOT_FIT[case]
    with pytest.raises(UserError, match=message):
        run(**settings)


def batches(*arrays, form=tuple):
    """The arrays batch by batch, from a loader that can be read only once."""
    return (form(a[i : i + 32] for a in arrays) for i in range(0, 64, 32))


def as_dict(pair):
    return dict(zip("xy", pair, strict=True))


IN_BATCHES = {
    "features": (batches(X[:, :5], Y), {}, r"are \(float32\[32, 5\], int32\[32\]\): .*dot_general"),
    "labels": (batches(X, Y * 1.5), {}, r"are \(float32\[32, 6\], float32\[32\]\): in the loss: "),
    "columns": (batches(X, Y[:, None]), {}, r"in the loss: .* target is int32\[1\]; the"),
    "a metric": (batches(X, Y), {"metrics": {"m": lambda o: 0}}, r"in the metric m: .*but 2 were"),
    "dicts": (batches(X, Y, form=as_dict), {}, "needs pairs, .* a batch is a dict of x, y; return"),
    "triples": (batches(X, Y, Y), {}, "needs pairs, .* a batch is one of 3; return"),
}


@pytest.mark.parametrize("case", IN_BATCHES)
def test_what_does_not_fit_an_iterable_of_batches_is_named_as_for_arrays(case):
    train, settings, message = IN_BATCHES[case]
    with pytest.raises(UserError, match=message):
        run(train, **settings)


def update_of(**changes):
    """A plain update with other functions; each change is a function of the plain Update."""

    def update(objective, optimizer):
        plain = gradient_update(objective, optimizer)
        return plain._replace(**{name: change(plain) for name, change in changes.items()})

    return update


def widened(plain):
    def step(ts, batch, valid):
        result = plain.step(ts, batch, valid)
        return result._replace(new=result.new._replace(opt={"more": result.new.opt}))

    return step


UPDATES = {
    "no Update": (
        lambda objective, optimizer: None,
        r"must return an Update\(init, step\)",
    ),
    "one argument": (lambda objective: None, r"update: <lambda>\(objective\) must take"),
    "one value of init": (
        update_of(init=lambda plain: lambda params: plain.init(params)[0]),
        r"update: init\(params\) must return \(opt_state, averaged params or None\)",
    ),
    "nothing": (
        update_of(step=lambda plain: lambda *_: None),
        r"must end with `return StepResult\(new, .* got NoneType",
    ),
    "a state": (
        update_of(step=lambda plain: lambda *given: plain.step(*given).new),
        r"must end with `return StepResult\(new, .* got TrainState",
    ),
    "another state": (update_of(step=widened), "update: its step changes the form of opt, from"),
    "an error": (
        update_of(step=lambda plain: lambda ts, batch, valid: ts.weights),
        "update: its step fails: .*arguments.py, line .*'TrainState' object has no attribute 'wei",
    ),
}


@pytest.mark.parametrize("case", UPDATES)
def test_an_update_that_no_run_can_use_is_refused_before_the_first_step(case):
    update, message = UPDATES[case]
    with pytest.raises(UserError, match=message):
        run(update=update)
    parts = build(CONFIG, "c")
    parts.update = update
    with pytest.raises(UserError, match=f"^c: .*{message}"):
        checked_recipe(parts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"objective": one_number},
            r"^loss: must be one number for each of the 128 .* got float32\[\]",
        ),
        ({"objective": two_values}, r"objective: must return \(losses, state, metrics\)"),
        (
            {"model": mlp((5,), 2, dims=(4,))},
            r"do not fit the data, .*128, 6.*dot_general",
        ),
        ({"metrics": [lambda o, l: o]}, r"metrics: <lambda> ends with shape \(2,\); return a num"),
        ({"metrics": {"m": lambda o, l: None}}, "metrics: m returns nothing; return a number"),
        ({"loss": mse}, r"the target \(\); .*store those of a regression as floats"),
        ({"model": linen.Dense(2)}, r"model: Dense is of another library; wrap it: docs/"),
        ({"model": OfLinen()}, r"model: OfLinen is of another library; wrap it: docs/"),
        ({"model": nnx.Dropout}, r"model: Dropout is of another library; wrap it: docs/"),
        ({"callbacks": [NoView()]}, r"NoView.on_steps must take .*on_steps\(self, run\)"),
        ({"callbacks": [NoView]}, r"callbacks: NoView is a class; pass an object: NoView\("),
        ({"batch_size": 0, "epochs": 0}, r"batch_size: must be .*got 0\n?.*epochs: must be"),
        ({"folder": __file__}, r"folder: .*test_arguments.py is a file; name a folder"),
    ],
)
def test_what_does_not_fit_is_named_before_the_first_step(settings, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        run(**settings)


@pytest.mark.slow
def test_numbers_of_numpy_are_numbers():
    sizes = {"epochs": np.int64(1), "batch_size": np.int32(4), "val_size": np.uint8(24)}
    run = fit(MODEL, (X, Y), optimizer=sgd(0.1), ema=np.float32(0.5), **sizes)
    assert run.step == 10
