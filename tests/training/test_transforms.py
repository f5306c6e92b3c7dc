"""Transforms and groups of params, against Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from training.base import Optimizer
from training.kinds import find
from training.optimizers import adam, adamw, lion, muon, sgd
from training.transforms import (
    chain,
    clip_by_global_norm,
    clip_by_value,
    decayed_weights,
    frozen,
    groups,
    layer_decay,
    lookahead,
    scaled,
    scheduled,
)
from utils import UserError, named_leaves


@pytest.mark.parametrize("name", find("optimizer")[0])
def test_every_optimizer_says_its_kind(name):
    """A step goes downhill; what only changes gradients, or nothing, does not."""
    args = {
        "clip_by_global_norm": {"max_norm": 1.0},
        "clip_by_value": {"limit": 1.0},
        "decayed_weights": {"weight_decay": 0.1},
        "sgd": {"lr": 0.1},
        "scaled": {"optimizer": adam(), "rate": 2.0},
        "groups": {"rules": ((".*", adam()),)},
        "lookahead": {"optimizer": adam()},
        "layer_decay": {"optimizer": adam(), "decay": 0.75},
        "scheduled": {"optimizer": adam(), "schedule": lambda step: 0.5},
    }
    optimizer = find("optimizer")[0][name](**args.get(name, {}))
    params, grads = tree(0), tree(1)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    slope = sum(
        jnp.vdot(u, g) for u, g in zip(*map(jax.tree.leaves, (updates, grads)), strict=True)
    )
    step = "return" if name == "lookahead" else "step"
    assert optimizer.kind == (step if slope < 0 else "gradients" if slope > 0 else "")


def test_nothing_may_shorten_the_way_back_of_lookahead():
    slow = lookahead(adam())
    inside = [slow, groups(((".*", slow),)), chain(clip_by_value(1.0), slow), lookahead(own())]
    for optimizer in inside:
        assert optimizer.kind == "return"
        wrappers = {
            "scaled": lambda: scaled(optimizer, 0.5),  # noqa: B023
            "layer_decay": lambda: layer_decay(optimizer, 0.5),  # noqa: B023
            "scheduled": lambda: scheduled(optimizer, lambda step: 0.5),  # noqa: B023
        }
        for name, wrap in wrappers.items():
            with pytest.raises(ValueError, match=rf"write lookahead\({name}\("):
                wrap()
    with pytest.raises(ValueError, match="for gradients, and go uphill"):
        chain(adam(), slow)
    with pytest.raises(ValueError, match="contains a lookahead already"):
        lookahead(slow)
    assert lookahead(scaled(adam(), 0.5)).kind == "return"


@pytest.mark.slow
def test_lookahead_equals_optax_and_its_closed_form():
    params = {"w": jnp.arange(3.0), "b": jnp.ones(2)}
    slope = jax.grad(lambda p: jnp.sin(p["w"]).sum() + (p["b"] ** 2).sum())
    ours = lookahead(adam(0.1), every=3, share=0.4)
    theirs = optax.lookahead(optax.adam(0.1), 3, 0.4)
    own, pair = params, optax.LookaheadParams.init_synced(params)
    state, other = ours.init(own), theirs.init(pair)
    for _ in range(8):
        updates, state = ours.update(slope(own), state, own)
        own = optax.apply_updates(own, updates)
        updates, other = theirs.update(slope(pair.fast), other, pair)
        pair = optax.apply_updates(pair, updates)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), own, pair.fast)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state["slow"], pair.slow)
    # Under a constant gradient of 1, five steps of 0.1 lead 0.5 away, of which the slow ones keep
    # 0.5, then 0.25 of the way.
    falling = lookahead(sgd(0.1), 5, 0.5, schedule=lambda step: 5 / step)
    p, state, seen = jnp.zeros(1), falling.init(jnp.zeros(1)), []
    for _ in range(11):
        updates, state = falling.update(jnp.ones(1), state, p)
        p = p + updates
        seen.append(-float(p[0]))
    expected = [0.1, 0.2, 0.3, 0.4, 0.25, 0.35, 0.45, 0.55, 0.65, 0.375, 0.475]
    np.testing.assert_allclose(seen, expected, rtol=1e-5)


def own(update=lambda grads, state, params=None: (grads, state)):
    """An optimizer of a user, who says nothing about its kind."""
    return Optimizer(lambda params: {}, update)


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        ([lion(), decayed_weights(0.1)], "optimizer 1 changes gradients, but optimizer 0 has"),
        ([chain(clip_by_value(1.0), sgd(0.1)), own(), clip_by_global_norm(1.0)], "optimizer 2 ch"),
        ([sgd(0.1), own(), muon()], "optimizer 2 would take the updates of optimizer 0"),
    ],
)
def test_an_order_that_cannot_be_meant_is_an_error(optimizers, message):
    with pytest.raises(ValueError, match=f"^optimizers: {message}"):
        chain(*optimizers)


def test_what_does_not_say_its_kind_may_be_anywhere():
    assert chain(sgd(0.1), own()).kind == "step"
    assert chain(own(), clip_by_value(1.0), own(), sgd(0.1)).kind == "step"
    assert chain(own(), clip_by_value(1.0)).kind == ""
    assert chain(sgd(0.1), optax.clip(1.0)).kind == "step"
    assert chain(clip_by_value(1.0), decayed_weights(0.1)).kind == "gradients"


def tree(seed):
    draw = np.random.default_rng(seed)
    shapes = {
        "stem": {"weight": (3, 4), "bias": (4,)},
        "blocks": [{"weight": (4, 4), "scale": (4,)}],
        "head": {"weight": (4, 2)},
    }
    return jax.tree.map(
        lambda s: jnp.asarray(draw.normal(size=s), jnp.float32),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


def descend(optimizer, steps=10):
    """The params after several steps along random gradients, by one compiled program."""
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    params = tree(0)
    state = optimizer.init(params)
    for seed in range(1, steps + 1):
        params, state = step(params, state, tree(seed))
    assert len(traces) == 1
    return params


def assert_same(ours, theirs):
    ours, theirs = named_leaves(ours), named_leaves(theirs)
    assert ours.keys() == theirs.keys()
    for name, leaf in ours.items():
        np.testing.assert_allclose(leaf, theirs[name], rtol=1e-6, atol=2e-7, err_msg=name)


def mask(*names):
    """A mask for Optax that is True for these leaves of `tree`."""
    return lambda params: jax.tree.unflatten(
        jax.tree.structure(params), [name in names for name in named_leaves(params)]
    )


WEIGHTS = ("stem/weight", "blocks/0/weight", "head/weight")


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (clip_by_global_norm(0.5), optax.clip_by_global_norm(0.5)),
        # some steps are clipped, some are not
        (clip_by_global_norm(6.0), optax.clip_by_global_norm(6.0)),
        (clip_by_value(0.3), optax.clip(0.3)),
        (decayed_weights(0.2), optax.add_decayed_weights(0.2, mask(*WEIGHTS))),
        (decayed_weights(0.2, exclude=""), optax.add_decayed_weights(0.2)),
        (
            decayed_weights(0.2, include="head/.*"),
            optax.add_decayed_weights(0.2, mask("head/weight")),
        ),
        (
            decayed_weights(0.2, exclude="head/.*"),
            optax.add_decayed_weights(0.2, lambda p: {**mask()(p), "stem": True, "blocks": True}),
        ),
        (frozen(), optax.set_to_zero()),
    ],
)
def test_transforms_equal_optax(ours, theirs):
    reference = optax.chain(theirs, optax.adam(0.1, eps=0.1))
    assert_same(descend(chain(ours, adam(0.1, eps=0.1))), descend(reference))


def test_the_global_norm_is_over_all_leaves_and_zero_gradients_stay_zero():
    updates, _ = clip_by_global_norm(1.0).update({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, {})
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [0.6, 0.8], rtol=1e-6)
    zeros = {"a": jnp.zeros(3)}
    assert not clip_by_global_norm(1.0).update(zeros, {})[0]["a"].any()


def test_clipping_does_not_hide_a_nan():
    grads = {"a": jnp.array([1.0, jnp.nan]), "b": jnp.ones(2)}
    updates, _ = clip_by_global_norm(1.0).update(grads, {})
    assert jnp.isnan(updates["a"]).all() and jnp.isnan(updates["b"]).all()


@pytest.mark.parametrize(
    "rules",
    [[["head/.*", "adam"]], {"head/.*": adam()}, [[".*", frozen]], [".*", adam()], [adam()], [3]],
)
def test_what_is_no_rule_of_groups_is_refused_with_the_right_form(rules):
    with pytest.raises(ValueError, match=r'rules: .* pass pairs, as groups\(\[\["head/.*", adamw'):
        groups(rules)


def test_groups_equal_optax():
    ours = groups(
        [
            ["head/.*", adamw(0.1, weight_decay=0.5)],
            ["stem/.*", frozen()],
            [".*", scaled(sgd(0.1, 0.9), 0.5)],
        ]
    )
    theirs = optax.multi_transform(
        {
            "head": optax.adamw(0.1, weight_decay=0.5),
            "stem": optax.set_to_zero(),
            "rest": optax.sgd(0.05, 0.9),
        },
        {
            "stem": {"weight": "stem", "bias": "stem"},
            "blocks": [{"weight": "rest", "scale": "rest"}],
            "head": {"weight": "head"},
        },
    )
    assert_same(descend(ours), descend(theirs))


def test_the_first_rule_that_matches_wins_and_nested_groups_see_the_same_names():
    inner = groups([[".*/bias", frozen()], ["stem/weight", adamw(0.1, exclude="stem/weight")]])
    params = descend(groups([["stem/.*", inner], [".*", frozen()]]))
    assert_same(params["stem"]["weight"], descend(optax.adam(0.1))["stem"]["weight"])
    np.testing.assert_array_equal(params["stem"]["bias"], tree(0)["stem"]["bias"])
    np.testing.assert_array_equal(params["head"]["weight"], tree(0)["head"]["weight"])


def test_the_state_of_groups_has_readable_names_and_nothing_for_a_frozen_leaf():
    params = {"stem": {"w": jnp.ones(2)}, "head": {"w": jnp.ones(2)}}
    state = groups([["stem/.*", frozen()], [".*", adam()]]).init(params)
    assert set(named_leaves(state)) == {"1/step", "1/m/head/w", "1/v/head/w"}


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: groups([["stem/.*", frozen()]]),
            r"no rule matches blocks/0/scale, blocks/0/weight, head/weight",
        ),
        (lambda: groups([["tail/.*", frozen()], [".*", adam()]]), r"'tail/\.\*' matches no name"),
        (lambda: decayed_weights(0.1, include="tail/.*"), r"'tail/\.\*' matches no name"),
        (lambda: decayed_weights(0.1, exclude="tail/.*"), r"'tail/\.\*' matches no name"),
    ],
)
def test_rules_that_do_not_fit_the_params_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make().init(tree(0))


@pytest.mark.parametrize(
    "make, argument",
    [
        (lambda: decayed_weights(0.1, include="["), "include"),
        (lambda: groups([]), "rules"),
        (lambda: groups([["(", adam()]]), "rules"),
    ],
)
def test_arguments_out_of_range_are_refused(make, argument):
    with pytest.raises(ValueError, match=f"^{argument}: "):
        make()
