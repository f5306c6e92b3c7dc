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
from training.base import Objective, StepResult, TrainState
from training.gradient import gradient
from training.loss import cross_entropy
from training.metrics import accuracy
from training.objective import supervised, with_precision
from training.optimizers import adam, sgd
from training.run import Reader
from training.update import (
    accepted,
    accepting,
    bad_leaf_name,
    cleared,
    gradient_update,
    loop_back,
    loop_for,
    zero_sums,
)

pytestmark = pytest.mark.gpu

MODEL = mlp((4,), 3, dims=(8,))


def objective_of(model=MODEL, loss=cross_entropy):
    return supervised(model, loss, {"accuracy": accuracy}, (), ())


def first_state(update, objective, batch, seed=0, model=MODEL, freeze=False):
    params, state = model.init(jax.random.key(1))
    opt, ema = update.init(params)
    sums = zero_sums(objective, params, state, batch, freeze=freeze)
    return TrainState(jnp.int32(0), jnp.uint32(seed), params, state, opt, ema, sums, jnp.float32(1))


def random_batch(seed, rows=6):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, 4)).astype(np.float32), rng.integers(0, 3, rows).astype(np.int32)


def run(update, objective, batches, valid=None, freeze=False):
    ts = first_state(update, objective, batches[0], freeze=freeze)
    step = jax.jit(accepting(update.step))
    for batch in batches:
        ts = step(ts, batch, len(batch[1]) if valid is None else valid)
    return ts


def run_looped(update, ts, batches, fori_loop=jax.lax.fori_loop):
    """The same steps in one compiled loop, as in a training program."""
    return looped(update, fori_loop)(ts, held(batches), 0, len(batches))


def looped(update, fori_loop):
    """The compiled function (state, held batches, start, end) -> the state after these steps."""

    def loop(ts, batches, start, end):
        def one(i, ts):
            return accepting(update.step)(
                ts, jax.tree.map(lambda a: a[i], batches), batches[1].shape[1]
            )

        return fori_loop(start, end, one, ts)

    return jax.jit(loop)


def held(batches):
    return jax.tree.map(lambda *a: jnp.stack(a), *batches)


def hit(ts):
    """The name of the leaf that the first bad step hit; needs only shapes of the state."""
    return bad_leaf_name(jax.eval_shape(lambda: ts), int(ts.sums["bad_leaf"]))


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_steps_equal_those_of_optax():
    batches = [random_batch(i) for i in range(5)]
    ts = run(gradient_update(objective_of(), adam(lr=0.01)), objective_of(), batches)

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
    assert ts.sums["epoch"]["examples"] == 30
    np.testing.assert_allclose(ts.sums["epoch"]["values"]["loss"]["MEAN"], total, rtol=1e-5)


@pytest.mark.slow
def test_masked_rows_have_no_effect():
    objective = objective_of()
    update = gradient_update(objective, adam(lr=0.01))
    x, y = random_batch(0)
    x[4:] = 1e6  # would change the result
    ts = run(update, objective, [(x, y)], valid=4)
    short = run(update, objective, [(x[:4], y[:4])])
    assert_close(ts.params, short.params)
    assert_close(ts.sums, short.sums)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("valid", [6, 5])
def test_microbatches_give_the_gradient_of_the_whole_batch(unroll, valid):
    objective = objective_of()
    batches = [random_batch(i) for i in range(3)]
    whole = run(gradient_update(objective, adam(lr=0.01)), objective, batches, valid)
    update = gradient_update(objective, adam(lr=0.01), accumulate=3, unroll=unroll)
    parts = run(update, objective, batches, valid)
    assert_close(parts.params, whole.params)
    assert_close(parts.sums, whole.sums)


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
    ts = run(update, objective, batches, valid)

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
    values = Reader().values("train", [jax.device_get(ts.sums["epoch"])])
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
        step = jax.jit(accepting(update.step)).lower(
            first_state(update, objective, batch), batch, 6
        )
        text = step.compile().as_text()
        seen.append((text.count(" dot("), text.count(" while(")))
    (with_counts, counting_loops), (without, loops) = seen
    assert with_counts == without
    assert counting_loops == loops + 1  # only the labels are read in a loop of their own


@pytest.mark.slow
def test_a_bad_step_changes_only_the_counters():
    objective = objective_of()
    update = gradient_update(objective, adam(lr=0.01), ema=0.9)
    good, after = random_batch(0), random_batch(1)
    bad = (good[0] * np.nan, good[1])
    with_bad = run(update, objective, [good, bad, bad, after])
    without = run(update, objective, [good, after])
    assert_same(with_bad.params, without.params)
    assert_same(with_bad.opt, without.opt)
    assert with_bad.sums["bad_steps"] == 2
    assert with_bad.sums["first_bad"] == 1
    assert with_bad.step == 4
    assert with_bad.sums["epoch"]["examples"] == without.sums["epoch"]["examples"] == 12
    assert without.sums["first_bad"] == -1
    assert np.isfinite(with_bad.sums["epoch"]["values"]["loss"]["MEAN"])


@pytest.mark.parametrize("fori_loop", [None, jax.lax.fori_loop, loop_back])
def test_a_frozen_state_stays_unchanged_from_its_first_bad_step_on(fori_loop):
    objective = objective_of()
    update = gradient_update(objective, adam(lr=0.01), ema=0.9)
    good = [random_batch(i) for i in range(4)]
    bad, worse = (good[0][0] * np.nan, good[0][1]), (good[1][0], good[1][1] + 7)
    batches = [*good[:2], bad, good[2], worse, good[3]]
    if fori_loop:
        first = first_state(update, objective, good[0], freeze=True)
        ts = run_looped(update, first, batches, fori_loop)
    else:
        ts = run(update, objective, batches, freeze=True)
    before = run(update, objective, good[:2])  # without bad steps
    assert [int(ts.sums[name]) for name in ("bad_steps", "first_bad", "freeze")] == [1, 2, 1]
    assert hit(ts) == "the loss"
    assert_same(ts._replace(sums=cleared(ts.sums) | {"freeze": 0}), before)
    assert before.step == 2


@pytest.mark.parametrize("freeze", [False, True])
def test_a_loop_that_goes_back_takes_and_refuses_the_same_steps(freeze):
    """The calls of it, and which of the ten steps are bad, are drawn."""
    objective, rng = objective_of(), np.random.default_rng(0)
    update = gradient_update(objective, adam(lr=0.01), ema=0.9)
    start = first_state(update, objective, random_batch(0), freeze=freeze)
    plain, loop = looped(update, jax.lax.fori_loop), looped(update, loop_back)
    ways = [set(), {0}, {9}, set(range(10)), *(set(rng.integers(10, size=4)) for _ in range(8))]
    for bad in ways:
        batches = [random_batch(i) for i in range(10)]
        for i in bad:  # the loss breaks, or the gradient
            batches[i] = (batches[i][0] * rng.choice([np.nan, 1e25]), batches[i][1])
        ends = sorted({*rng.integers(1, 10, size=2).tolist(), 10})
        batches, ts = held(batches), start
        expected = plain(start, batches, 0, 10)
        for begin, end in zip([0, *ends], ends, strict=False):
            ts = loop(ts, batches, begin, end)
        assert_same(ts, loop(start, batches, 0, 10))  # wherever the calls end
        for name in ("bad_steps", "first_bad", "bad_leaf"):
            assert ts.sums[name] == expected.sums[name], (bad, ends, name)
        assert ts.step == expected.step and ts.sums.keys() == expected.sums.keys()
        assert_close(ts, expected, rtol=1e-6)


def test_a_loop_goes_back_only_for_a_small_state_whose_steps_keep_no_values():
    update = gradient_update(objective_of(), adam(lr=0.01))
    ts = jax.eval_shape(lambda: first_state(update, objective_of(), random_batch(0)))
    assert loop_for(ts, stacked=False) is loop_back
    large = ts._replace(ema=jax.ShapeDtypeStruct((2**22,), jnp.float32))
    for state, stacked in ((ts, True), (large, False), (ts._replace(sums={"ring": {}}), False)):
        assert loop_for(state, stacked) is jax.lax.fori_loop


def test_a_cleared_state_continues_as_if_there_had_been_no_bad_batch():
    objective = objective_of()
    update = gradient_update(objective, adam(lr=0.01), ema=0.9)
    good = [random_batch(i) for i in range(3)]
    ts = run(update, objective, [*good[:2], (good[0][0] * np.inf, good[0][1])], freeze=True)
    read = jax.device_get(ts)
    for state in (ts._replace(sums=cleared(ts.sums)), read._replace(sums=cleared(read.sums))):
        counters = [leaf for name, leaf in state.sums.items() if name not in ("epoch", "window")]
        assert {leaf.dtype for leaf in counters} == {np.dtype("int32")}
        expected = run(update, objective, good, freeze=True)
        assert_same(jax.jit(accepting(update.step))(state, good[2], 6), expected)


# Each column of a batch can break another part of a step. SOUND breaks none; each row of BREAKS
# breaks the part that is its key.
SOUND = (0, 1, 0, 0)
BREAKS = {
    "the loss": (np.nan, 1, 0, 0),
    "the gradient of nest/1/root": (0, 0, 0, 0),
    "opt/v/slope": (0, 1, 1e25, 0),
    "state/seen": (0, 1, 0, 3e38),
}
FRAGILE = {"bias": 1.0, "nest": [1.0, {"root": 1.0}], "slope": 1.0}


@Objective
def fragile(params, state, x, key, train):
    shift, root = params["nest"]
    losses = shift + (params["bias"] - x[:, 0]) ** 2
    losses += jnp.sqrt(root["root"] * x[:, 1]) + params["slope"] * x[:, 2]
    return losses, {"seen": state["seen"] + x[:, 3].sum(), "steps": state["steps"] + 1}, {}


def fragile_state(update, freeze=False):
    params = jax.tree.map(jnp.float32, FRAGILE)
    state = {"seen": jnp.float32(0), "steps": jnp.int32(0)}
    opt, ema = update.init(params)
    sums = zero_sums(fragile, params, state, rows(SOUND), freeze=freeze)
    return TrainState(jnp.int32(0), jnp.uint32(0), params, state, opt, ema, sums, jnp.float32(1))


def rows(row):
    """A batch that repeats one row six times."""
    return np.tile(np.float32(row), (6, 1))


@pytest.mark.parametrize("name", BREAKS)
def test_the_first_leaf_that_a_bad_step_hit_is_named(name):
    update = gradient_update(fragile, adam(lr=0.01))
    step, ts = jax.jit(accepting(update.step)), fragile_state(update)
    ts = step(step(ts, rows(SOUND), 6), rows(BREAKS[name]), 6)
    assert (int(ts.sums["first_bad"]), hit(ts)) == (1, name)
    for row in [row for other, row in BREAKS.items() if other != name]:
        ts = step(ts, rows(row), 6)
    assert [int(ts.sums[key]) for key in ("bad_steps", "first_bad")] == [4, 1]
    assert hit(ts) == name  # the first one stays
    assert ts.step == 5


def test_the_cause_is_named_and_not_its_consequences():
    update = gradient_update(fragile, adam(lr=0.01))
    ts = jax.jit(accepting(update.step))(fragile_state(update), rows((0, 1, 1e25, 3e38)), 6)
    assert hit(ts) == "state/seen"
    # The momentum overflows at 1.9 * 2e38, and the param after it.
    update = gradient_update(fragile, sgd(lr=1e-38, momentum=0.9))
    ts = fragile_state(update)
    for _ in range(2):
        ts = jax.jit(accepting(update.step))(ts, rows((0, 1, 2e38, 0)), 6)
    assert (int(ts.sums["first_bad"]), hit(ts)) == (1, "opt/m/slope")


def test_an_infinite_loss_in_a_masked_row_breaks_nothing():
    update = gradient_update(fragile, adam(lr=0.01))
    # The square of 2e19 is infinite, but its gradient is finite.
    batch = np.concatenate([rows(SOUND)[1:], np.float32([(2e19, 1, 0, 0)])])
    step, ts = jax.jit(accepting(update.step)), fragile_state(update)
    assert step(ts, batch, 5).sums["bad_steps"] == 0
    assert step(ts, batch, 6).sums["bad_steps"] == 1


def test_params_that_overflow_are_named():
    update = gradient_update(fragile, sgd(lr=1e20), ema=0.5)
    ts = jax.jit(accepting(update.step))(fragile_state(update), rows((0, 1, 1e25, 0)), 6)
    assert hit(ts) == "params/slope"
    ts = fragile_state(update)
    params, ema = ts.params | {"slope": jnp.float32(-3e38)}, ts.ema | {"slope": jnp.float32(3e38)}
    ts = jax.jit(accepting(update.step))(ts._replace(params=params, ema=ema), rows(SOUND), 6)
    assert hit(ts) == "ema/slope"


def test_a_label_outside_the_classes_or_a_huge_learning_rate_breaks_the_loss():
    objective, (x, y) = objective_of(), random_batch(0)
    ts = run(gradient_update(objective, adam(lr=0.01)), objective, [(x, y + 7)])
    assert hit(ts) == "the loss"
    ts = run(gradient_update(objective, sgd(lr=1e30)), objective, [(x, y)] * 3)
    assert hit(ts) == "the loss"


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [False, True])
def test_vmapped_replicas_freeze_independently(freeze):
    update = gradient_update(fragile, adam(lr=0.01), ema=0.9)
    broken = [rows(row) for row in (SOUND, *BREAKS.values())]
    batches = [[rows(SOUND)] * 5, broken, [rows(SOUND)] * 5]
    singles = [fragile_state(update, freeze) for _ in broken]
    both, step = jax.tree.map(lambda *a: jnp.stack(a), *singles), jax.jit(accepting(update.step))
    for batch in batches:
        both = jax.jit(jax.vmap(accepting(update.step), (0, 0, None)))(both, np.stack(batch), 6)
        singles = [step(ts, one, 6) for ts, one in zip(singles, batch, strict=True)]
    assert both.step.tolist() == ([3, 1, 1, 1, 1] if freeze else [3] * 5)
    assert both.sums["first_bad"].tolist() == [-1, 1, 1, 1, 1]
    replicas = [jax.tree.map(lambda a, r=r: a[r], both) for r in range(5)]
    assert [hit(ts) for ts in replicas[1:]] == list(BREAKS)
    for ts, single in zip(replicas, singles, strict=True):
        assert_close(ts, single)


def test_a_gradient_whose_tree_is_not_that_of_the_params_is_named_by_its_number():
    update = gradient_update(fragile, adam(lr=0.01))
    ts, ones, mask = fragile_state(update), jnp.ones(6), jnp.ones(6, bool)
    grads = [jnp.ones((), jnp.int32), jnp.ones(2), jnp.array([1, jnp.inf])]
    # Only floats are counted.
    assert hit(accepted(ts, StepResult(ts, grads, ones, {}), mask)) == "a gradient (leaf 1)"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.complex64])
@pytest.mark.parametrize("freeze", [False, True])
def test_an_optimizer_state_may_hold_counters_random_keys_and_other_float_types(dtype, freeze):
    update = gradient_update(fragile, sgd(lr=0.01))
    floats = {"c": jnp.ones(3), "d": jnp.ones(2, dtype), "e": jnp.ones(2)}
    opt = {"a": jnp.int32(5), "b": jax.random.key(1)} | floats
    ts = fragile_state(update, freeze)._replace(opt=opt)

    @jax.jit
    def step(ts, opt):
        new = ts._replace(opt=opt)
        return accepted(ts, StepResult(new, ts.params, jnp.ones(6), {}), jnp.ones(6, bool))

    doubled = {name: 2 * leaf for name, leaf in floats.items()}
    new = {"a": jnp.int32(6), "b": jax.random.key(2)} | doubled
    good = step(ts, new)
    bad = step(ts, new | {"d": new["d"].at[1].set(jnp.nan)})
    plain = lambda opt: opt | {"b": jax.random.key_data(opt["b"])}  # noqa: E731
    assert_same(plain(good.opt), plain(new))
    assert_same(plain(bad.opt), plain(opt))
    assert hit(bad) == "opt/d"


@pytest.mark.slow
def test_a_bad_step_keeps_the_running_statistics():
    model = resnet((8, 8, 1), 3, widths=(4,), depth=1)
    objective = objective_of(model)
    update = gradient_update(objective, adam(lr=0.01))
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(6, 8, 8, 1)).astype(np.float32), rng.integers(0, 3, 6).astype(np.int32)
    ts = first_state(update, objective, batch, model=model)
    # The loss and the gradients are finite, but the variance of such a batch is not.
    huge = jax.jit(accepting(update.step))(ts, (batch[0] * np.float32(1e25), batch[1]), 6)
    assert huge.sums["bad_steps"] == 1
    assert re.fullmatch("state/.*/var", hit(huge))
    assert_same(huge.state, ts.state)
    good = jax.jit(accepting(update.step))(ts, batch, 6)
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
    ts = run(gradient_update(objective, adam(lr=0.01)), objective, [random_batch(0)])
    assert ts.sums["bad_steps"] == 1
    assert hit(ts) == "the gradient of head/bias"


@pytest.mark.slow
def test_averaged_params_follow_their_formula():
    objective = objective_of()
    plain = gradient_update(objective, adam(lr=0.1))
    averaged = gradient_update(objective, adam(lr=0.1), ema=0.5)
    batches = [random_batch(i) for i in range(8)]
    expected = first_state(plain, objective, batches[0]).params
    for i in range(8):
        decay = min(0.5, (1 + i) / (10 + i))
        params = run(plain, objective, batches[: i + 1]).params
        expected = jax.tree.map(lambda e, p, d=decay: d * e + (1 - d) * p, expected, params)
    assert_close(run(averaged, objective, batches).ema, expected)


@pytest.mark.slow
def test_lr_scale_multiplies_the_update():
    objective = objective_of()
    update = gradient_update(objective, adam(lr=0.01))
    batch = random_batch(0)
    ts = first_state(update, objective, batch)
    whole = accepting(update.step)(ts, batch, 6).params
    half = accepting(update.step)(ts._replace(lr_scale=jnp.float32(0.5)), batch, 6).params
    assert_close(jax.tree.map(lambda a, b: (a + b) / 2, ts.params, whole), half)


@pytest.mark.slow
def test_randomness_depends_only_on_seed_and_step():
    model = mlp((4,), 3, dims=(8,), dropout=0.5)
    objective = supervised(model, cross_entropy, {}, (), ())
    update = gradient_update(objective, adam(lr=0.01))
    batch = random_batch(0)
    ts = first_state(update, objective, batch, model=model)

    def loss(ts):
        return accepting(update.step)(ts, batch, 6).sums["epoch"]["values"]["loss"]["MEAN"]

    assert loss(ts) == loss(ts)
    assert loss(ts) != loss(ts._replace(step=jnp.int32(1)))
    assert loss(ts) != loss(ts._replace(seed=jnp.uint32(1)))


@pytest.mark.torture
def test_the_whole_update_can_be_vmapped():
    objective = objective_of()
    update = gradient_update(objective, adam(lr=0.01), ema=0.9)
    batches = [random_batch(0), random_batch(1)]
    states = [first_state(update, objective, batches[0], seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *states)
    both = jax.vmap(accepting(update.step), (0, 0, None))(
        stacked, jax.tree.map(lambda *a: np.stack(a), *batches), 6
    )
    for r in (0, 1):
        assert_close(
            jax.tree.map(lambda a, r=r: a[r], both),
            accepting(update.step)(states[r], batches[r], 6),
        )


@pytest.mark.slow
def test_bfloat16_computes_in_half_precision_and_keeps_float32_params():
    seen = []

    def spy(params, state, x, *, train=False, key=None):
        seen.append((x.dtype, {leaf.dtype for leaf in jax.tree.leaves(params)}))
        return MODEL.apply(params, state, x, train=train, key=key)

    objective = objective_of(with_precision(MODEL._replace(apply=spy), "bfloat16"))
    batches = [random_batch(i) for i in range(3)]
    ts = run(gradient_update(objective, adam(lr=0.01)), objective, batches)
    full = run(gradient_update(objective_of(), adam(lr=0.01)), objective_of(), batches)
    assert set(map(str, (seen[0][0], *seen[0][1]))) == {"bfloat16"}
    assert {leaf.dtype for leaf in jax.tree.leaves(ts.params)} == {np.dtype("float32")}
    out, _ = with_precision(MODEL, "bfloat16").apply(ts.params, {}, random_batch(0)[0])
    assert out.dtype == np.float32
    losses = [result.sums["epoch"]["values"]["loss"]["MEAN"] for result in (ts, full)]
    np.testing.assert_allclose(*losses, rtol=0.02)
