"""Models of Flax (NNX and Linen), Equinox and Haiku as ours, named in a config as
{"name": "nnx", "args": {"module": "my_nets.Net", "arguments": {"width": 64}}}.

`module` is the class, or a function that makes such a module. What has the name of a fact about the
data (input_shape, num_classes, vocab_size) is filled in. A module learns whether it is training by
any argument of its call in `mode`, and draws from the key of the step. Its arrays become nested
dicts with the library's names: trained floats are params, all others are state.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import random
from jaxtyping import Array, PyTree

from model.base import Model
from utils import map_named, named_leaves


def nnx(
    module: Callable,
    arguments: dict | None = None,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
    vocab_size: int | None = None,
) -> Model:
    """A module of Flax NNX, made with `rngs`. Its call gets a batch."""
    from flax import nnx

    facts = {"input_shape": input_shape, "num_classes": num_classes, "vocab_size": vocab_size}
    new = constructor(nnx.Module, module, arguments, facts, "rngs")

    def split(net: nnx.Module) -> tuple:
        return nnx.split(net, nnx.Param, nnx.RngState, ...)

    graph, *forms = jax.eval_shape(lambda key: split(new(rngs=nnx.Rngs(key))), random.key(0))
    streams = sorted({key.tag for _, key in nnx.to_flat_state(forms[1])})

    def init(key: Array) -> tuple[PyTree, PyTree]:
        _, params, _, others = split(new(rngs=nnx.Rngs(key)))
        return as_dicts(nnx.to_pure_dict(params)), as_dicts(nnx.to_pure_dict(others))

    def variables(form: PyTree, dicts: PyTree) -> PyTree:
        leaves = jax.tree.leaves(with_leaves(nnx.to_pure_dict(form), dicts))
        return jax.tree.unflatten(jax.tree.structure(form), leaves)

    def apply(
        params: PyTree, state: PyTree, x: PyTree, *, train: bool = False, key: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        unused = jax.tree.map(blank, forms[1])  # by what is not random
        net = nnx.merge(graph, variables(forms[0], params), unused, variables(forms[2], state))
        if train and key is not None:
            keys = zip(streams, random.split(key, len(streams)), strict=True)
            nnx.reseed(net, policy="match_shape", **dict(keys))
        (net.train if train else net.eval)()
        out = net(x, **mode(net, train))
        return out, same_form(state, nnx.to_pure_dict(split(net)[3])) if train else state

    return Model(init, apply)


def linen(
    module: Callable,
    arguments: dict | None = None,
    *,
    input_shape: tuple[int, ...],
    num_classes: int | None = None,
    vocab_size: int | None = None,
) -> Model:
    """A module of Flax Linen. Its call gets a batch; the stream "dropout" has the key."""
    from flax import linen
    from flax.core.meta import unbox

    facts = {"input_shape": input_shape, "num_classes": num_classes, "vocab_size": vocab_size}
    net = constructor(linen.Module, module, arguments, facts)()

    def init(key: Array) -> tuple[PyTree, PyTree]:
        variables = dict(unbox(net.init(key, one_input(facts), **mode(net, False))))
        variables.pop("intermediates", None)
        return variables.pop("params", {}), variables

    def apply(
        params: PyTree, state: PyTree, x: PyTree, *, train: bool = False, key: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        rngs = {} if key is None else {"dropout": key, "params": random.fold_in(key, 0)}
        call = {"rngs": rngs, "mutable": [*state] if train else False, **mode(net, train)}
        out = net.apply({"params": params, **state}, x, **call)
        return (out[0], same_form(state, out[1])) if train else (out, state)

    return Model(init, apply)


def equinox(
    module: Callable,
    arguments: dict | None = None,
    axis_name: str = "batch",
    *,
    input_shape: tuple[int, ...] | None = None,
    num_classes: int | None = None,
    vocab_size: int | None = None,
) -> Model:
    """A module of Equinox, made with `key`. Its call gets one example, under a vmap of this name,
    and `state` and `key` where it has such arguments; with `state` it returns (output, state)."""
    import equinox as eqx

    facts = {"input_shape": input_shape, "num_classes": num_classes, "vocab_size": vocab_size}
    new = eqx.nn.make_with_state(constructor(eqx.Module, module, arguments, facts, "key"))

    def split(key: Array) -> tuple[PyTree, PyTree, PyTree]:
        net, running = new(key=key)
        params, others = eqx.partition(net, eqx.is_inexact_array)
        constants, rest = eqx.partition(others, eqx.is_array)
        return params, {"constants": constants, "running": running}, rest

    *forms, rest = eqx.filter_eval_shape(split, random.key(0))

    def init(key: Array) -> tuple[PyTree, PyTree]:
        params, state, _ = split(key)
        return as_dicts(params), as_dicts(state)

    def apply(
        params: PyTree, state: PyTree, x: PyTree, *, train: bool = False, key: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        arrays = with_leaves(forms[1], state)
        net = eqx.combine(with_leaves(forms[0], params), arrays["constants"], rest)
        net = eqx.nn.inference_mode(net, not train)
        accepted = inspect.signature(net.__call__).parameters

        def of_one(x: PyTree, key: Array | None) -> tuple[PyTree, PyTree]:
            given = {"state": arrays["running"], "key": key} | mode(net, train)
            out = net(x, **{name: value for name, value in given.items() if name in accepted})
            return out if "state" in accepted else (out, arrays["running"])

        keys = key if key is None else random.split(key, len(x))
        out, running = jax.vmap(of_one, axis_name=axis_name, out_axes=(0, None))(x, keys)
        return out, same_form(state, {**arrays, "running": running}) if train else state

    return Model(init, apply)


def haiku(
    module: Callable,
    arguments: dict | None = None,
    *,
    input_shape: tuple[int, ...],
    num_classes: int | None = None,
    vocab_size: int | None = None,
) -> Model:
    """A module of Haiku, made inside of `hk.transform_with_state`. Its call gets a batch."""
    import haiku as hk

    facts = {"input_shape": input_shape, "num_classes": num_classes, "vocab_size": vocab_size}
    new = constructor(hk.Module, module, arguments, facts)

    def forward(x: PyTree, train: bool) -> PyTree:
        net = new()
        return net(x, **mode(net, train))

    net = hk.transform_with_state(forward)

    def arrays(
        key: Array,
    ) -> tuple[PyTree, PyTree]:  # only in training does a batch norm create its statistics
        return net.init(key, one_input(facts), True)

    forms = jax.eval_shape(arrays, random.key(0))

    def apply(
        params: PyTree, state: PyTree, x: PyTree, *, train: bool = False, key: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        trees = with_leaves(forms[0], params), with_leaves(forms[1], state)
        out, new_state = net.apply(*trees, key, x, train)
        return out, same_form(state, new_state) if train else state

    def init(key: Array) -> tuple[PyTree, PyTree]:
        params, state = arrays(key)
        return as_dicts(params), as_dicts(state)

    return Model(init, apply)


def mode(net: Callable, train: bool) -> dict[str, bool]:
    """The arguments of a module's call that say whether it is training."""
    flags = dict.fromkeys(("train", "training", "is_training"), train)
    flags |= dict.fromkeys(("deterministic", "use_running_average", "inference"), not train)
    accepted = inspect.signature(net.__call__).parameters
    return {name: value for name, value in flags.items() if name in accepted}


def constructor(
    base: type,
    module: Callable,
    arguments: dict[str, Any] | None,
    facts: dict[str, Any],
    *given: str,
) -> Callable:
    """A function of the `given` arguments, such as a key, that makes the module from its class with
    these arguments and facts; the class gets only the given arguments that it accepts."""
    name = getattr(module, "__name__", "")
    if not name:
        name = type(module).__name__
        raise ValueError(f"module: pass the class {name} and `arguments`, not an object of it")
    called = module
    if inspect.isclass(module):
        check_base(base, module, name)
        initialize: Callable = module.__init__
        called = partial(initialize, None)
    signature = inspect.signature(called)
    accepted = signature.parameters
    facts = {key: facts[key] for key in accepted if facts.get(key) is not None}
    arguments = facts | {key: tuples(value) for key, value in (arguments or {}).items()}
    present = [key for key in given if key in accepted]
    try:
        signature.bind(**arguments, **dict.fromkeys(present))
    except TypeError as error:
        own = [key for key in accepted if key not in (*given, "parent", "name")]
        has = f"it has {', '.join(own)}" if own else "it has no arguments"
        raise ValueError(f"arguments: {name}: {error}; {has}") from None

    def make(**more: Any) -> Any:
        made = module(**arguments, **{key: more[key] for key in present})
        check_base(base, type(made), f"what {name} returns")
        return made

    return make


def check_base(base: type, cls: type, what: str) -> None:
    """Refuse a class of another library than that of the adapter."""
    if not issubclass(cls, base):
        library = base.__module__.partition("._")[0].removesuffix(".module")
        raise ValueError(f"module: {what} is not a Module of {library}; is it of another adapter?")


def tuples(value: Any) -> Any:
    """A value of JSON with its lists as tuples, as for every part."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def one_input(facts: dict[str, Any]) -> Array:
    """A batch of one input, of tokens or of numbers."""
    shape = (1, *facts["input_shape"])
    return jnp.zeros(shape, jnp.float32 if facts["vocab_size"] is None else jnp.int32)


def blank(form: jax.ShapeDtypeStruct) -> Array:
    """An array of this form, also of keys."""
    is_key = jnp.issubdtype(form.dtype, jax.dtypes.prng_key)
    return jnp.broadcast_to(random.key(0) if is_key else jnp.zeros((), form.dtype), form.shape)


def as_dicts(tree: PyTree) -> dict[str, Any]:
    """The arrays of a tree as nested dicts, by their names."""
    dicts = {}
    for name, leaf in named_leaves(tree).items():
        *outer, last = name.split("/")
        inner = dicts
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = leaf.astype(leaf.dtype)  # without JAX's mark of a weak type
    return dicts


def with_leaves(tree: PyTree, dicts: PyTree) -> PyTree:
    """The tree with the arrays of nested dicts."""
    leaves = named_leaves(dicts)
    return map_named(lambda name, _: leaves[name], tree)


def same_form(state: PyTree, tree: PyTree) -> PyTree:
    """The new arrays of a state, in its types: a module may return more of them, or in bfloat16."""
    new = named_leaves(tree)
    return map_named(lambda name, old: new[name].astype(old.dtype), state)
