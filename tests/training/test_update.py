"""The update step: compared with Optax; masks, microbatches, bad steps, averaging and vmap."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.base import Model
from model.mlp import mlp
from model.resnet import resnet
from tests.runs import assert_same
from training.base import Objective, StepResult, TrainState
from training.loss import cross_entropy
from training.metrics import accuracy
from training.objective import supervised, with_precision
from training.optimizers import adam, sgd
from training.rows import GOOD, Sums
from training.run import Reader
from training.update import (
    bad_leaf_name,
    first_not_finite,
    gradient,
    gradient_update,
    made_floats,
    with_refusal,
)

pytestmark = pytest.mark.gpu

MODEL = mlp((4,), 3, dims=(8,))


def objective_of(model=MODEL, loss=cross_entropy):
    return supervised(model, loss, {"accuracy": accuracy}, (), ())


MEASURED = {"loss": "MEAN", "accuracy": "MEAN"}
LOSS = {"loss": "MEAN"}


def first_state(update, seed=0, model=MODEL):
    params, state = model.init(jax.random.key(1))
    opt, ema = update.init(params)
    numbers = jnp.bool(False), jnp.float32(1)
    return TrainState(jnp.int32(0), jnp.uint32(seed), params, state, opt, ema, *numbers)


def random_batch(seed, rows=6):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 4)).astype(np.float32), rng.integers(0, 3, rows).astype(np.int32)


def run(update, batches, valid=None, halts=False, ts=None, measured=MEASURED):
    """(the state after a step on each batch, the rows of the steps)"""
    ts, rows = ts or first_state(update), []
    step = jax.jit(with_refusal(update.step, measured, halts=halts))
    for batch in batches:
        ts, row = step(ts, batch, len(batch[1]) if valid is None else valid)
        rows.append(row)
    return ts, jax.device_get(jax.tree.map(lambda *a: jnp.stack(a), *rows))


def summed(rows, measured=MEASURED):
    """The Sums of rows."""
    sums = Sums(measured, jax.tree.map(lambda a: a[0], rows))
    sums.add(rows)
    return sums


def hits(ts, rows):
    """{step: the name of the array that was bad in it}; needs only shapes of the state."""
    params = jax.eval_shape(lambda: ts.params)
    bad = np.atleast_1d(rows["bad"]).tolist()
    return {i: bad_leaf_name(params, leaf) for i, leaf in enumerate(bad) if leaf != GOOD}


def leaf_not_finite(ts):
    """The name of the first array of a state that is not finite."""
    number = int(jax.jit(first_not_finite)(ts))
    return None if number < 0 else made_floats(ts)[number][0]


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@pytest.mark.slow
def test_steps_equal_those_of_optax():
    batches = [random_batch(i) for i in range(5)]
    ts, rows = run(gradient_update(objective_of(), adam(lr=0.01)), batches)

    params, _ = MODEL.init(jax.random.key(1))
    reference = optax.adam(0.01)
    opt = reference.init(params)

    def loss_of(params, x, y):
        logits, _ = MODEL.apply(params, {}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    total = 0
    for x, y in batches:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        total += loss * len(y)
        updates, opt = reference.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
    assert_close(ts.params, params)
    assert ts.step == 5
    assert rows["examples"].sum() == 30
    np.testing.assert_allclose(rows["values"]["loss"].sum(), total, rtol=1e-5)


@pytest.mark.slow
def test_masked_rows_have_no_effect():
    objective = objective_of()
    update = gradient_update(objective, adam(lr=0.01))
    x, y = random_batch(0)
    x[4:] = 1e6  # would change the result
    ts, rows = run(update, [(x, y)], valid=4)
    short, short_rows = run(update, [(x[:4], y[:4])])
    assert_close(ts.params, short.params)
    assert_close(rows, short_rows)


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("valid", [6, 5])
def test_microbatches_give_the_gradient_of_the_whole_batch(unroll, valid):
    objective = objective_of()
    batches = [random_batch(i) for i in range(3)]
    whole, rows = run(gradient_update(objective, adam(lr=0.01)), batches, valid)
    update = gradient_update(objective, adam(lr=0.01), accumulate=3, unroll=unroll)
    parts, rows_of_parts = run(update, batches, valid)
    assert_close(parts.params, whole.params)
    assert_close(rows_of_parts, rows)


def token_batch(seed, rows=6):
    """Sequences of 0 to 3 tokens, padded with the label -1."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows, 3, 4)), rng.integers(0, 3, (rows, 3))
    lengths = rng.permutation(rows) % 4
    y = np.where(np.arange(3) < lengths[:, None], y, -1)
    return x.astype(np.float32), y.astype(np.int32)


def two_terms(logits, label):
    """Terms of which one counts tokens, and the other examples."""
    tokens = cross_entropy(logits, label, ignore_label=-1)
    return {"tokens": tokens, "size": 0.1 * jnp.mean(logits**2)}


@pytest.mark.parametrize("loss", [partial(cross_entropy, ignore_label=-1), two_terms])
@pytest.mark.parametrize(
    ("accumulate", "valid"),
    [(3, 5), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((1, 6), (2, 6), (6, 4)))],
)
def test_steps_on_sequences_of_unequal_lengths_equal_those_of_optax(loss, accumulate, valid):
    """The gradient is that of the mean over all tokens of a batch, however it is cut."""
    model = Model(MODEL.init, lambda p, s, x, **_: (token_logits(p, x), s))
    objective = supervised(model, loss, {}, (), ())
    batches = [token_batch(i) for i in range(4)]
    update = gradient_update(objective, adam(lr=0.01), accumulate=accumulate)
    ts, rows = run(update, batches, valid, measured=LOSS)

    params, _ = MODEL.init(jax.random.key(1))
    reference = optax.adam(0.01)
    opt, total, tokens, size = reference.init(params), 0, 0, 0

    def loss_of(params, x, y):
        logits = token_logits(params, x)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        mean = jnp.where(y >= 0, each, 0).sum() / (y >= 0).sum()
        extra = 0.1 * jnp.mean(logits**2) if loss is two_terms else 0
        return mean + extra, (mean, extra)

    for x, y in batches:
        x, y = x[:valid], y[:valid]
        (_, (mean, extra)), grads = jax.value_and_grad(loss_of, has_aux=True)(params, x, y)
        total, tokens = total + mean * (y >= 0).sum(), tokens + (y >= 0).sum()
        size += extra
        updates, opt = reference.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
    assert_close(ts.params, params)
    values = Reader().values("train", [summed(rows, LOSS)])
    expected = total / tokens + size / len(batches)  # as many examples in each batch
    np.testing.assert_allclose(values["train_loss"], expected, rtol=1e-5)


def token_logits(params, x):
    """The perceptron at every position of a sequence."""
    return MODEL.apply(params, {}, x.reshape(-1, 4))[0].reshape(*x.shape[:2], 3)


@pytest.mark.slow
def test_counting_tokens_ahead_of_microbatches_does_not_run_the_model_twice():
    model = Model(MODEL.init, lambda p, s, x, **_: (token_logits(p, x), s))
    batch, seen = token_batch(0), []
    for loss in (partial(cross_entropy, ignore_label=-1), cross_entropy):
        objective = supervised(model, loss, {}, (), ())
        update = gradient_update(objective, sgd(lr=0.1), accumulate=2)
        step = jax.jit(with_refusal(update.step, LOSS)).lower(first_state(update), batch, 6)
        text = step.compile().as_text()
        seen.append((text.count(" dot("), text.count(" while(")))
    (with_counts, counting_loops), (without, loops) = seen
    assert with_counts == without
    assert counting_loops == loops + 1  # only the labels are read in a loop of their own


@pytest.mark.slow
def test_a_bad_step_changes_only_the_counters():
    update = gradient_update(objective_of(), adam(lr=0.01), ema=0.9)
    good, after = random_batch(0), random_batch(1)
    bad = (good[0] * np.nan, good[1])
    with_bad, rows = run(update, [good, bad, bad, after])
    without, good_rows = run(update, [good, after])
    assert_same(with_bad.params, without.params)
    assert_same(with_bad.opt, without.opt)
    assert hits(with_bad, rows) == {1: "the loss", 2: "the loss"}
    assert not hits(without, good_rows)
    assert with_bad.step == 4
    assert rows["steps"].tolist() == [1, 0, 0, 1]
    sums = summed(rows)
    assert (sums.examples, sums.steps, sums.refused) == (12, 2, 2)
    assert sums.results()[0] == summed(good_rows).results()[0]


@pytest.mark.slow
def test_a_halted_state_stays_unchanged_from_its_first_bad_step_on():
    update = gradient_update(objective_of(), adam(lr=0.01), ema=0.9)
    good = [random_batch(i) for i in range(4)]
    bad, worse = (good[0][0] * np.nan, good[0][1]), (good[1][0], good[1][1] + 7)
    ts, rows = run(update, [*good[:2], bad, good[2], worse, good[3]], halts=True)
    before, _ = run(update, good[:2])  # without bad steps
    assert next(iter(hits(ts, rows).items())) == (2, "the loss")
    assert rows["steps"].tolist() == [1, 1, 0, 0, 0, 0]
    assert ts.halted and not before.halted and before.step == 2
    assert_same(ts._replace(halted=before.halted), before)
    # It continues as if there had been no bad batch.
    ts, _ = run(update, [good[2]], halts=True, ts=ts._replace(halted=np.bool(False)))
    assert_same(ts, run(update, good[:3])[0])


# Each column of a batch can break another part of a step. SOUND breaks none; each row of BREAKS
# breaks the part that is its key.
SOUND = (0, 1, 0, 0)
BREAKS = {
    "the loss": (np.nan, 1, 0, 0),
    "the gradient of nest/1/root": (0, 0, 0, 0),
    "the gradient of slope": (0, 1, np.inf, 0),
}
# Rows that break only the new state.
BREAKS_STATE = {"opt/v/slope": (0, 1, 1e25, 0), "state/seen": (0, 1, 0, 3e38)}
FRAGILE = {"bias": 1.0, "nest": [1.0, {"root": 1.0}], "slope": 1.0}


@Objective
def fragile(params, state, x, key, train):
    shift, root = params["nest"]
    losses = shift + (params["bias"] - x[:, 0]) ** 2
    losses += jnp.sqrt(root["root"] * x[:, 1]) + params["slope"] * x[:, 2]
    return losses, {"seen": state["seen"] + x[:, 3].sum(), "steps": state["steps"] + 1}, {}


def fragile_state(update):
    params = jax.tree.map(jnp.float32, FRAGILE)
    state = {"seen": jnp.float32(0), "steps": jnp.int32(0)}
    opt, ema = update.init(params)
    numbers = jnp.bool(False), jnp.float32(1)
    return TrainState(jnp.int32(0), jnp.uint32(0), params, state, opt, ema, *numbers)


def repeated(row):
    """A batch that repeats one row six times."""
    return np.tile(np.float32(row), (6, 1))


def fragile_steps(update, batches, valid=6, halts=False):
    """(the state after these batches, the rows of the steps)"""
    ts, rows = fragile_state(update), []
    for batch in batches:
        ts, row = jax.jit(with_refusal(update.step, LOSS, halts=halts))(ts, batch, valid)
        rows.append(row)
    return ts, jax.tree.map(lambda *a: jnp.stack(a), *rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["the loss", "the gradient of nest/1/root"])
def test_the_first_array_that_is_bad_in_a_step_is_named(name):
    update = gradient_update(fragile, adam(lr=0.01))
    others = [row for other, row in BREAKS.items() if other != name]
    batches = map(repeated, [SOUND, BREAKS[name], *others])
    ts, rows = fragile_steps(update, batches)
    assert hits(ts, rows)[1] == name
    assert rows["steps"].tolist() == [1, 0, 0, 0]
    assert ts.step == 4 and leaf_not_finite(ts) is None


@pytest.mark.parametrize("name", BREAKS_STATE)
def test_a_state_that_overflows_though_loss_and_gradients_are_finite_is_found(name):
    update = gradient_update(fragile, adam(lr=0.01))
    ts, rows = fragile_steps(update, map(repeated, [SOUND, BREAKS_STATE[name]]))
    assert not hits(ts, rows)
    assert leaf_not_finite(ts) == name


@pytest.mark.slow
def test_the_first_array_of_a_state_in_the_order_of_computation_is_named():
    update = gradient_update(fragile, adam(lr=0.01))
    ts, _ = fragile_steps(update, [repeated((0, 1, 1e25, 3e38))])
    assert leaf_not_finite(ts) == "state/seen"
    # The momentum overflows at 1.9 * 2e38, and the param after it.
    update = gradient_update(fragile, sgd(lr=1e-38, momentum=0.9))
    ts, _ = fragile_steps(update, [repeated((0, 1, 2e38, 0))] * 2)
    assert leaf_not_finite(ts) == "opt/m/slope"


@pytest.mark.slow
@pytest.mark.parametrize("halts", [False, True])
def test_vmapped_replicas_halt_independently(halts):
    update = gradient_update(fragile, adam(lr=0.01), ema=0.9)
    broken = [repeated(row) for row in (SOUND, *BREAKS.values())]
    count = len(broken)
    batches = [[repeated(SOUND)] * count, broken, [repeated(SOUND)] * count]
    singles, step = [fragile_state(update)] * count, with_refusal(update.step, LOSS, halts=halts)
    both = jax.tree.map(lambda *a: jnp.stack(a), *singles)
    bad = []
    for batch in batches:
        both, row = jax.jit(jax.vmap(step, (0, 0, None)))(both, np.stack(batch), 6)
        singles = [jax.jit(step)(ts, one, 6)[0] for ts, one in zip(singles, batch, strict=True)]
        bad.append(row["bad"])
    assert both.step.tolist() == [3] + [1 if halts else 3] * len(BREAKS)
    names = [hits(singles[r], {"bad": bad[1][r]}).get(0) for r in range(count)]
    assert names[:3] == [None, *list(BREAKS)[:2]] and None not in names[1:]
    replicas = [jax.tree.map(lambda a, r=r: a[r], both) for r in range(count)]
    for ts, single in zip(replicas, singles, strict=True):
        assert_close(ts, single)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
def test_an_optimizer_state_may_hold_counters_random_keys_and_other_float_types(dtype):
    update = gradient_update(fragile, sgd(lr=0.01))
    floats = {"c": jnp.ones(3), "d": jnp.ones(2, dtype), "e": jnp.ones(2)}
    opt = {"a": jnp.int32(5), "b": jax.random.key(1)} | floats
    ts = fragile_state(update)._replace(opt=opt)

    @jax.jit
    def step(ts, opt, losses):
        result = StepResult(ts._replace(opt=opt), ts.params, losses, {})
        return with_refusal(lambda *_: result, LOSS)(ts, repeated(SOUND), 6)[0]

    doubled = {name: 2 * leaf for name, leaf in floats.items()}
    new = {"a": jnp.int32(6), "b": jax.random.key(2)} | doubled
    good = step(ts, new, jnp.ones(6))
    bad = step(ts, new, jnp.full(6, jnp.nan))
    plain = lambda opt: opt | {"b": jax.random.key_data(opt["b"])}  # noqa: E731
    assert_same(plain(good.opt), plain(new))
    assert_same(plain(bad.opt), plain(opt))
    assert leaf_not_finite(good) is None
    overflowed = step(ts, new | {"d": new["d"].at[1].set(jnp.nan)}, jnp.ones(6))
    assert leaf_not_finite(overflowed) == "opt/d"


@pytest.mark.slow
def test_a_bad_step_keeps_the_running_statistics():
    model = resnet((8, 8, 1), 3, widths=(4,), depth=1)
    update = gradient_update(objective_of(model), adam(lr=0.01))
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(6, 8, 8, 1)).astype(np.float32), rng.integers(0, 3, 6).astype(np.int32)
    ts, step = first_state(update, model=model), jax.jit(with_refusal(update.step, MEASURED))
    bad, row = step(ts, (batch[0] * np.float32(np.nan), batch[1]), 6)
    assert hits(bad, row) == {0: "the loss"}
    assert_same(bad.state, ts.state)
    # The loss and the gradients are finite, but the variance of such a batch is not.
    huge, row = step(ts, (batch[0] * np.float32(1e25), batch[1]), 6)
    assert not hits(huge, row)
    assert re.fullmatch("state/.*/var", leaf_not_finite(huge))
    good, _ = step(ts, batch, 6)
    assert any(
        np.any(a != b)
        for a, b in zip(jax.tree.leaves(good.state), jax.tree.leaves(ts.state), strict=True)
    )


def test_every_microbatch_has_its_own_randomness():
    noise = lambda params, state, batch, key, train: (  # noqa: E731
        params["w"] * jax.random.normal(key, (len(batch),)),
        state,
        {},
    )
    key, mask = jax.random.key(0), jnp.ones(6, bool)
    _, _, losses, _ = gradient(
        Objective(noise), {"w": jnp.ones(())}, {}, jnp.zeros(6), mask, key, accumulate=3
    )
    assert np.unique(losses).size == 6


def test_an_infinite_gradient_is_a_bad_step_even_if_the_loss_is_finite():
    objective = objective_of(loss=lambda output, target: jnp.sqrt(jnp.abs(output[0] * 0)))
    ts, rows = run(gradient_update(objective, adam(lr=0.01)), [random_batch(0)])
    assert hits(ts, rows) == {0: "the gradient of head/bias"}


@pytest.mark.slow
def test_averaged_params_follow_their_formula():
    objective = objective_of()
    plain = gradient_update(objective, adam(lr=0.1))
    averaged = gradient_update(objective, adam(lr=0.1), ema=0.5)
    batches = [random_batch(i) for i in range(8)]
    expected = first_state(plain).params
    for i in range(8):
        decay = min(0.5, (1 + i) / (10 + i))
        params = run(plain, batches[: i + 1])[0].params
        expected = jax.tree.map(lambda e, p, d=decay: d * e + (1 - d) * p, expected, params)
    assert_close(run(averaged, batches)[0].ema, expected)


@pytest.mark.slow
def test_lr_scale_multiplies_the_update():
    objective = objective_of()
    update = gradient_update(objective, adam(lr=0.01))
    batch, step = random_batch(0), with_refusal(update.step, MEASURED)
    ts = first_state(update)
    whole = step(ts, batch, 6)[0].params
    half = step(ts._replace(lr_scale=jnp.float32(0.5)), batch, 6)[0].params
    assert_close(jax.tree.map(lambda a, b: (a + b) / 2, ts.params, whole), half)


@pytest.mark.slow
def test_randomness_depends_only_on_seed_and_step():
    model = mlp((4,), 3, dims=(8,), dropout=0.5)
    objective = supervised(model, cross_entropy, {}, (), ())
    update = gradient_update(objective, adam(lr=0.01))
    batch = random_batch(0)
    ts = first_state(update, model=model)

    def loss(ts):
        return with_refusal(update.step, LOSS)(ts, batch, 6)[1]["values"]["loss"]

    assert loss(ts) == loss(ts)
    assert loss(ts) != loss(ts._replace(step=jnp.int32(1)))
    assert loss(ts) != loss(ts._replace(seed=jnp.uint32(1)))


@pytest.mark.slow
def test_bfloat16_computes_in_half_precision_and_keeps_float32_params():
    seen = []

    def spy(params, state, x, *, train=False, key=None):
        seen.append((x.dtype, {leaf.dtype for leaf in jax.tree.leaves(params)}))
        return MODEL.apply(params, state, x, train=train, key=key)

    objective = objective_of(with_precision(MODEL._replace(apply=spy), "bfloat16"))
    batches = [random_batch(i) for i in range(3)]
    ts, rows = run(gradient_update(objective, adam(lr=0.01)), batches)
    _, full = run(gradient_update(objective_of(), adam(lr=0.01)), batches)
    assert set(map(str, (seen[0][0], *seen[0][1]))) == {"bfloat16"}
    assert {leaf.dtype for leaf in jax.tree.leaves(ts.params)} == {np.dtype("float32")}
    out, _ = with_precision(MODEL, "bfloat16").apply(ts.params, {}, random_batch(0)[0])
    assert out.dtype == np.float32
    losses = [each["values"]["loss"].sum() for each in (rows, full)]
    np.testing.assert_allclose(*losses, rtol=0.02)
