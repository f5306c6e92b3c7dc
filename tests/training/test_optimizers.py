"""Each optimizer against Optax, step by step, and what the compiled step needs of all of them."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.layers.blocks import unrolled
from training import schedules
from training.optimizers import adagrad, adam, adamw, lamb, lion, muon, rmsprop, sgd
from training.transforms import chain, clip_by_value, scheduled
from utils import UserError, named_leaves

pytestmark = pytest.mark.gpu


@cache
def tree(seed, dtype):
    """Params of a small net: wide and tall matrices, a kernel, and names without decay."""
    draw = np.random.default_rng(seed)
    shapes = {
        "blocks": [{"weight": (3, 3, 2, 4), "scale": (4,)}, {"weight": (6, 4), "bias": (4,)}],
        "out": {"weight": (4, 9), "bias": (9,)},
        "head": {"weight": (9, 3)},
    }
    return jax.tree.map(
        lambda s: jnp.asarray(draw.normal(size=s), dtype),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


def no_decay(params):
    return {
        "blocks": [{"weight": True, "scale": False}, {"weight": True, "bias": False}],
        "out": {"weight": True, "bias": False},
        "head": {"weight": True},
    }


def some_decay(params):
    return {
        "blocks": [{"weight": False, "scale": False}, {"weight": True, "bias": False}],
        "out": {"weight": True, "bias": False},
        "head": {"weight": False},
    }


def descend(optimizer, dtype="float32", steps=12):
    """The params after each of several steps along random gradients, by one compiled program."""
    traces = []

    # Without optimizations, since most of the time of these tests is compilation.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(params, state, grads):
        traces.append(1)
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    params = tree(0, dtype)
    state = optimizer.init(params)
    path = []
    for seed in range(1, steps + 1):
        params, state = step(params, state, tree(seed, dtype))
        path.append(params)
    assert len(traces) == 1
    return path


def assert_same(our_path, their_path, rtol, atol=0.0):
    for ours, theirs in zip(our_path, their_path, strict=True):
        ours, theirs = named_leaves(ours), named_leaves(theirs)
        assert ours.keys() == theirs.keys()
        for name, leaf in ours.items():
            assert leaf.dtype == theirs[name].dtype, name
            np.testing.assert_allclose(leaf, theirs[name], rtol=rtol, atol=atol, err_msg=name)


def optax_muon(lr, beta, weight_decay, adamw_lr):
    """Optax's Muon for all matrices but the head; AdamW (Optax's muon has NAdamW) elsewhere."""
    labels = {
        "blocks": [{"weight": "muon", "scale": "rest"}, {"weight": "muon", "bias": "rest"}],
        "out": {"weight": "muon", "bias": "rest"},
        "head": {"weight": "rest"},
    }
    parts = {
        "muon": optax.contrib.muon(
            lr,
            beta=beta,
            weight_decay=weight_decay,
            muon_weight_dimension_numbers=partial(jax.tree.map, axes_of_a_matrix),
        ),
        "rest": optax.adamw(adamw_lr, weight_decay=weight_decay, mask=decay_mask_of_the_rest),
    }
    return optax.multi_transform(parts, labels)


def axes_of_a_matrix(leaf):
    return optax.contrib.MuonDimensionNumbers(tuple(range(leaf.ndim - 1)), leaf.ndim - 1)


def decay_mask_of_the_rest(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "weight", params)


PAIRS = {
    "sgd": (sgd(0.1), optax.sgd(0.1)),
    "momentum": (sgd(0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
    "nesterov": (
        sgd(0.1, momentum=0.8, nesterov=True),
        optax.sgd(0.1, momentum=0.8, nesterov=True),
    ),
    "adam, nesterov": (adam(0.01, nesterov=True), optax.nadam(0.01)),
    "adamw, nesterov": (
        adamw(0.01, b1=0.8, weight_decay=0.1, nesterov=True),
        optax.nadamw(0.01, b1=0.8, weight_decay=0.1, mask=no_decay),
    ),
    "adamw, include": (
        adamw(0.01, weight_decay=0.1, include="(blocks/1|out)/.*", exclude=".*bias"),
        optax.adamw(0.01, weight_decay=0.1, mask=some_decay),
    ),
    "lion, include": (
        lion(0.01, weight_decay=0.1, include="(blocks/1|out)/.*", exclude=".*bias"),
        optax.lion(0.01, weight_decay=0.1, mask=some_decay),
    ),
    "adagrad": (adagrad(), optax.adagrad(0.01)),
    "adagrad from 0": (
        adagrad(0.1, initial=0.0, eps=1e-3),
        optax.adagrad(0.1, initial_accumulator_value=0.0, eps=1e-3),
    ),
    "rmsprop": (rmsprop(), optax.rmsprop(0.001, eps_in_sqrt=False)),
    "rmsprop momentum": (
        rmsprop(0.01, decay=0.95, eps=1e-3, momentum=0.9),
        optax.rmsprop(0.01, decay=0.95, eps=1e-3, momentum=0.9, eps_in_sqrt=False),
    ),
    "adam": (adam(), optax.adam(0.001)),
    "adam eps": (adam(0.1, b1=0.5, b2=0.9, eps=0.1), optax.adam(0.1, b1=0.5, b2=0.9, eps=0.1)),
    "adamw": (adamw(), optax.adamw(0.001, weight_decay=0.01, mask=no_decay)),
    "adamw all": (
        adamw(0.1, b1=0.0, weight_decay=0.3, exclude=""),
        optax.adamw(0.1, b1=0.0, weight_decay=0.3),
    ),
    "lamb": (lamb(), optax.lamb(0.001, weight_decay=0.01, mask=no_decay)),
    "lamb eps": (lamb(0.1, b2=0.9, eps=0.1, weight_decay=0.0), optax.lamb(0.1, b2=0.9, eps=0.1)),
    "lion": (lion(), optax.lion(0.0001, mask=no_decay)),
    "lion all": (
        lion(0.1, 0.5, 0.7, 0.2, exclude=""),
        optax.lion(0.1, b1=0.5, b2=0.7, weight_decay=0.2),
    ),
    "muon": (muon(), optax_muon(0.02, 0.95, 0.0, 0.001)),
    "muon decay": (
        muon(0.1, beta=0.8, weight_decay=0.2, adamw_lr=0.01),
        optax_muon(0.1, 0.8, 0.2, 0.01),
    ),
}
OURS = {name: ours for name, (ours, _) in PAIRS.items()} | {
    "scheduled": scheduled(adamw(), schedules.cosine(steps=5))
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_equals_optax(name):
    ours, theirs = PAIRS[name]
    assert_same(descend(ours), descend(theirs), rtol=1e-6, atol=2e-6 if "muon" in name else 2e-7)
    with jax.enable_x64(True):
        assert_same(descend(ours, "float64"), descend(theirs, "float64"), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "muon", "scheduled"])
def test_float32_stays_float32_and_compiles_once_where_float64_is_the_default(name):
    with jax.enable_x64(True):
        for leaf in jax.tree.leaves(descend(OURS[name], "float32", steps=3)):
            assert leaf.dtype == jnp.float32


@pytest.mark.parametrize("name", OURS)
def test_each_leaf_of_the_state_has_its_own_buffer(name):
    params = tree(0, "float32")
    for init in (OURS[name].init, jax.jit(OURS[name].init)):
        leaves = [*jax.tree.leaves(init(params)), *jax.tree.leaves(params)]
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nesterov", "adamw", "lamb", "muon", "scheduled"])
def test_vmap_over_replicas_equals_each_replica_alone(name):
    def train(params, grads):
        state = OURS[name].init(params)
        for _ in range(2):
            updates, state = OURS[name].update(grads, state, params)
        return updates

    replicas = [(tree(seed, "float32"), tree(seed + 10, "float32")) for seed in range(2)]
    together = jax.jit(jax.vmap(train))(*jax.tree.map(lambda *leaves: jnp.stack(leaves), *replicas))
    for i, (params, grads) in enumerate(replicas):
        alone = jax.jit(train)(params, grads)
        assert_same(
            [jax.tree.map(lambda leaf, i=i: leaf[i], together)], [alone], rtol=1e-5, atol=1e-7
        )


def in_blocks(seed, scan):
    """Params or gradients of three equal blocks, one by one or stacked."""
    draw = np.random.default_rng(seed)
    shapes = {"weight": (6, 4), "bias": (4,), "norm/scale": (5,), "conv/weight": (3, 3, 2, 4)}
    shapes |= {"deep/weight": (3, 3, 1, 4)}
    blocks = [
        {n: jnp.asarray(draw.normal(size=s), jnp.float32) for n, s in shapes.items()}
        for _ in range(3)
    ]
    stacked = {"0-2": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}
    return {"blocks": stacked if scan else blocks, "out": jnp.ones((4, 9))}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "lamb", "muon decay"])
def test_each_of_stacked_blocks_is_updated_as_by_itself(name):
    def updates(scan):
        params, options = in_blocks(0, scan), {"xla_backend_optimization_level": 0}
        update, state = (
            jax.jit(OURS[name].update, compiler_options=options),
            OURS[name].init(params),
        )
        for seed in (1, 2):
            updates, state = update(in_blocks(seed, scan), state, params)
        return unrolled(updates)

    assert_same([updates(True)], [updates(False)], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_zero_gradients_and_zero_params_give_zero_updates():
    zeros = jax.tree.map(jnp.zeros_like, tree(0, "float32"))
    for name in ("adagrad from 0", "rmsprop", "adamw", "lamb", "muon"):
        updates, _ = jax.jit(OURS[name].update)(zeros, OURS[name].init(zeros), zeros)
        assert all(not leaf.any() for leaf in jax.tree.leaves(updates)), name


def test_leaves_of_the_state_have_readable_names():
    params = {"conv": {"weight": jnp.ones((2, 3)), "bias": jnp.ones(3)}}
    assert set(named_leaves(adamw().init(params))) == {
        "step",
        "m/conv/weight",
        "m/conv/bias",
        "v/conv/weight",
        "v/conv/bias",
    }
    names = {
        "muon/step",
        "muon/m/conv/weight",
        "adamw/step",
        "adamw/m/conv/bias",
        "adamw/v/conv/bias",
    }
    assert set(named_leaves(muon().init(params))) == names
    assert set(named_leaves(chain(clip_by_value(1.0), sgd(0.1, 0.9)).init({"w": 1.0}))) == {"1/m/w"}


@pytest.mark.parametrize("factory", [adamw, lamb, lion, muon])
def test_a_rule_given_by_the_user_that_matches_nothing_is_refused(factory):
    params = {"dense": {"weight": jnp.ones((2, 3))}}
    factory().init(params)
    with pytest.raises(UserError, match=r"'dense/wieght' matches no name.*dense/weight"):
        factory(exclude="dense/wieght").init(params)
    with pytest.raises(UserError, match=r"'dense/wieght' matches no name.*dense/weight"):
        factory(include="dense/wieght").init(params)


def test_only_included_params_decay_by_muon_and_its_adamw():
    params = {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3)), "head": jnp.ones(3), "c": jnp.ones(3)}
    optimizer = muon(lr=0.1, weight_decay=0.5, adamw_lr=0.01, include="a|head")
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    expected = {"a": -0.05, "b": 0, "head": -0.005, "c": 0}
    assert jax.tree.map(lambda u: pytest.approx(float(u.ravel()[0])), updates) == expected


def test_muon_updates_depthwise_kernels_and_embeddings_by_adamw():
    """The embeddings of gpt, vit, rnn and unet, but no perceptron over the tokens of a mixer."""
    table = {"weight": jnp.ones((5, 4))}
    params = {"kernel": jnp.ones((3, 3, 4, 8)), "tokens": {"expand": table}}
    others = {"encoder": {"tokens": table, "positions": table}, "label": table}
    state = muon().init(params | others | {"depthwise": jnp.ones((3, 3, 1, 8))})
    assert set(state["muon"]["m"]) == {"kernel", "tokens/expand/weight"}
    assert set(state["adamw"]["m"]) == {*named_leaves(others), "depthwise"}


@pytest.mark.slow
def test_chains_may_mix_our_optimizers_with_optax():
    reference = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01), optax.scale(0.5))
    ours = chain(optax.clip_by_global_norm(1.0), adam(0.01), optax.scale(0.5))
    theirs = optax.chain(optax.clip_by_global_norm(1.0), adam(0.01), optax.scale(0.5))
    decayed = chain(adamw(0.01, exclude=""), optax.add_decayed_weights(-0.1))
    assert_same(descend(ours), descend(reference), rtol=1e-6, atol=1e-7)
    assert_same(descend(theirs), descend(reference), rtol=1e-6, atol=1e-7)
    decayed_reference = optax.chain(
        optax.adamw(0.01, weight_decay=0.01), optax.add_decayed_weights(-0.1)
    )
    assert_same(descend(decayed), descend(decayed_reference), rtol=1e-6, atol=1e-7)


def test_scheduled_equals_a_changing_learning_rate():
    schedule = schedules.warmup_cosine(warmup_steps=3, steps=10)
    reference = optax.adamw(lambda step: 0.01 * schedule(step), weight_decay=0.1, mask=no_decay)
    assert_same(
        descend(scheduled(adamw(0.01, weight_decay=0.1), schedule)),
        descend(reference),
        rtol=1e-6,
        atol=1e-7,
    )


@pytest.mark.parametrize(
    "factory, args, argument",
    [
        (sgd, {"lr": 0.1, "nesterov": True}, "nesterov"),
        (adamw, {"exclude": "(bias"}, "exclude"),
        (muon, {"by_adamw": "*"}, "by_adamw"),
        (chain, {}, "optimizers"),
    ],
)
def test_arguments_out_of_range_are_refused(factory, args, argument):
    with pytest.raises(ValueError, match=f"^{argument}: "):
        factory(**args)
