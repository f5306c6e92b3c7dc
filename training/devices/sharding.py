"""Which devices hold every array of a run: batches are sharded over the mesh's `data` and `fsdp`
axes, params by rules, everything else is replicated.

A rule is [regex, [axis of the mesh or null, ...]]: it shards each axis of the leaves that it
matches. The first matching rule is used; axes that it leaves out stay whole. A preset is a function
from a leaf's name and shape to such a list of axes. If a leaf holds the weights of several equal
blocks, its first axis stays whole, and rules are for the others. The optimizer's state and the
averaged weights are sharded like the params to which they belong.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Int, PyTree

from data_loader.nest import check_integers
from training.base import TrainState
from training.devices.options import MeshOptions, check_sharding
from training.devices.options import Sharding as ShardingRules
from utils import UserError, did_you_mean, is_stacked, map_named, match_rules, named_leaves

AXES = ("data", "fsdp", "tensor")  # of the mesh
Cut = tuple[str | None, ...]  # for each axis of a leaf, the axis of the mesh that shards it
Devices = Sequence[Any]  # of jax.Device, which a type checker does not know
ALL_DEVICES = MeshOptions()
BATCH = ("data", "fsdp")  # the axes of the mesh that a batch is sharded over
SMALL = 2**10  # numbers: `fsdp` leaves such leaves whole, since each sharded one costs an exchange

# What `tensor` shards: of two products in a row, the columns of the first and the rows of the
# second, so that devices exchange data only after both (Shoeybi et al., 2019). The number is the
# axis.
PRODUCTS = (
    (r"(.*/)?(query|key|value|expand|gate)/(weight|bias)", -1),
    (r"(.*/)?(out|project)/weight", -2),
    (r"(.*/)?hidden/\d*[02468]/(weight|bias)", -1),
    (r"(.*/)?hidden/\d*[13579]/weight", -2),
)


class Plan(NamedTuple):
    """The devices of a run and what each of them holds. With `stacked`, every leaf has an axis of
    replicas in front. The trainer uses devices only through this object."""

    mesh: Mesh | AbstractMesh  # an AbstractMesh if this machine lacks its devices
    rules: ShardingRules = None  # `sharding` of the config
    stacked: bool = False

    @classmethod
    def on_paper(cls, options: MeshOptions, rules: ShardingRules) -> "Plan":
        """The Plan of these options, even if this machine has too few devices for it."""
        try:
            check_sharding(rules)
        except ValueError as error:
            raise UserError(str(error)) from error
        shape = mesh_shape(options, jax.device_count())
        fits = misfit(shape, jax.devices()) is None
        return cls(make_mesh(options) if fits else AbstractMesh(shape, AXES), rules)

    def fits(self) -> bool:
        """Whether this machine has the devices of the mesh."""
        return isinstance(self.mesh, Mesh)

    def on_devices(self) -> "Plan":
        """This Plan, or an error if this machine does not have its devices."""
        if not self.fits():
            raise UserError(misfit(tuple(self.mesh.shape.values()), jax.devices()))
        return self

    @property
    def whole(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch(self, axis: int = 0) -> NamedSharding:
        """The sharding of a batch, whose examples lie along one axis."""
        return NamedSharding(self.mesh, PartitionSpec(*(None,) * axis, BATCH))

    @property
    def parts_of_batch(self) -> int:
        """Into how many parts a batch is cut; devices along the other axes hold the same part."""
        return math.prod(self.mesh.shape[axis] for axis in BATCH)

    def check_batch(self, size: int, option: str) -> None:
        """Refuse a batch size, given by this option, that does not divide over the devices."""
        parts = self.parts_of_batch
        if size % parts:
            raise UserError(
                f"{option}: {size} examples do not divide over {parts} devices; "
                f"use a multiple, such as {-(-size // parts) * parts}, or another mesh"
            )

    def put(self, tree: PyTree, shardings: PyTree[Sharding] | None = None) -> PyTree:
        """A tree of host arrays on the devices; whole on each of them unless `shardings`, one or a
        tree of them, are given. Each process has all the values."""
        check_integers(tree, bits=64 if jax.config.values["jax_enable_x64"] else 32)
        shardings = self.whole if shardings is None else shardings
        if jax.process_count() == 1:
            return jax.device_put(tree, shardings)
        if isinstance(shardings, jax.sharding.Sharding):
            return jax.tree.map(lambda leaf: put_leaf(leaf, shardings), tree)
        return jax.tree.map(put_leaf, tree, shardings)

    def rows(self, size: int) -> Int[np.ndarray, " rows"]:
        """Which rows of a batch of `size` this process reads: those that its devices hold."""
        shards = self.batch().addressable_devices_indices_map((size,)).values()
        return np.unique(np.concatenate([np.arange(size)[index] for index in shards]))

    def put_batch(self, tree: PyTree, size: int) -> PyTree:
        """A batch of `size` rows on the devices; `tree` holds the rows that this process reads."""
        check_integers(tree, bits=64 if jax.config.values["jax_enable_x64"] else 32)
        axis = int(self.stacked)
        sharding = self.batch(axis)
        if jax.process_count() == 1:
            return jax.device_put(tree, sharding)
        rows = self.rows(size)

        def put_part(leaf: np.ndarray) -> jax.Array:
            def part(index: tuple[slice, ...]) -> np.ndarray:
                start, stop, _ = index[axis].indices(size)
                first = np.searchsorted(rows, start)
                return leaf[(slice(None),) * axis + (slice(first, first + stop - start),)]

            leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
            shape = (*leaf.shape[:axis], size, *leaf.shape[axis + 1 :])
            return jax.make_array_from_callback(shape, sharding, part)  # pyright: ignore[reportArgumentType]  # the index is never None

        return jax.tree.map(put_part, tree)

    def cuts(self, params: PyTree) -> dict[str, Cut]:
        """{name: the mesh axis or None for each axis of the leaf}, of params or of their shapes."""
        leaves = named_leaves(params)
        cuts = cuts_by(self.rules, leaves, dict(self.mesh.shape))
        devices = self.mesh.shape["tensor"]
        if devices > 1 and not any("tensor" in cut for cut in cuts.values()):
            raise UserError(
                f"mesh.tensor: {devices} devices would all do the same work, since no leaf is "
                "sharded over them; write rules into `sharding`, "
                'as [["head/weight", [null, "tensor"]]]; '
                f"the leaves are {', '.join(leaves)}"
            )
        return cuts

    def of_params(self, params: PyTree) -> PyTree:
        """The sharding of each leaf of the params."""
        cuts = self.cuts(params)
        return map_named(lambda name, _: self.sharding(cuts[name]), params)

    def of_state(self, ts: TrainState) -> TrainState:
        """The shardings of a TrainState of arrays or shapes, in which replicas are not stacked."""
        cuts = self.cuts(ts.params)
        shapes = {name: leaf.shape for name, leaf in named_leaves(ts.params).items()}

        def sharding_of(name: str, leaf: Any) -> NamedSharding:
            if name.startswith("state/"):
                return self.sharding()
            owner = owner_of(name, leaf.shape, shapes)
            return self.sharding(cuts[owner] if owner else ())

        return map_named(sharding_of, ts)

    def sharding(self, cut: Cut = ()) -> NamedSharding:
        """The sharding of a leaf whose axes are cut over these axes of the mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*(None,) * self.stacked, *cut))


def owner_of(name: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> str | None:
    """The leaf of the params to which a leaf of the optimizer's state belongs: their names end
    alike, as opt/m/head/weight and head/weight."""
    parts = name.split("/")
    ends = ("/".join(parts[i:]) for i in range(1, len(parts)))
    return next((end for end in ends if shapes.get(end) == shape), None)


def cuts_by(rules: ShardingRules, leaves: dict[str, Any], sizes: dict[str, int]) -> dict[str, Cut]:
    """{name: its cut} by rules, or a preset's name, or both: a preset at the end of the list
    applies to all leaves that no rule matches."""
    if rules is None:
        rules = "tensor" if sizes["tensor"] > 1 else "fsdp" if sizes["fsdp"] > 1 else ()
    listed = (rules,) if isinstance(rules, str) else rules
    named = [rule for rule in listed if isinstance(rule, str)]  # one preset at most
    preset = PRESETS[named[0] if named else "data_parallel"]
    pairs = [(rule[0], tuple(rule[1])) for rule in listed if not isinstance(rule, str)]
    try:
        matched = match_rules(pairs, leaves)
    except UserError as error:
        raise UserError(f"sharding: {error}") from error
    cuts = {}
    for name, cut in matched.items():
        blocks = is_stacked(name)  # the axis of the blocks stays whole; rules are for one block
        shape = leaves[name].shape[blocks:]
        if cut is None:
            cut = preset(name, shape, sizes)
        else:
            check_cut(name, shape, cut, sizes)
        cuts[name] = (*(None,) * blocks, *cut) if cut else ()
    return cuts


def check_cut(name: str, shape: tuple[int, ...], cut: Cut, sizes: dict[str, int]) -> None:
    """Refuse a rule that does not fit a leaf."""
    where = f"sharding: {name} {tuple(shape)}"
    for axis in cut:
        if axis is not None and axis not in sizes:
            hint = did_you_mean(axis, AXES)
            raise UserError(f"{where}: the mesh has no axis {axis!r}{hint} {AXES}")
    if len(cut) > len(shape):
        raise UserError(
            f"{where}: the rule names {len(cut)} axes, {list(cut)}, and the leaf has {len(shape)}; "
            'make the rule match fewer leaves, as ".*/weight"'
        )
    for i, axis in enumerate(cut):
        if axis is None:
            continue
        if cut.count(axis) > 1:
            raise UserError(
                f"{where}: the rule shards two axes over {axis!r}, {list(cut)}; "
                "use another mesh axis for one of them"
            )
        if shape[i] % sizes[axis]:
            raise UserError(
                f"{where}: its axis {i} of {shape[i]} does not divide over mesh.{axis}, "
                f"which is {sizes[axis]}"
            )


def data_parallel(name: str, shape: tuple[int, ...], sizes: dict[str, int]) -> Cut:
    """Every device holds all params."""
    return ()


def fsdp(
    name: str, shape: tuple[int, ...], sizes: dict[str, int], cut: Sequence[str | None] = ()
) -> Cut:
    """Shard the largest axis that divides, and is not sharded yet, over `fsdp`."""
    axes = [*cut, *[None] * (len(shape) - len(cut))]
    free = [i for i, size in enumerate(shape) if axes[i] is None and size % sizes["fsdp"] == 0]
    if math.prod(shape) > SMALL and free and sizes["fsdp"] > 1:
        axes[max(free, key=lambda i: shape[i])] = "fsdp"
    return tuple(axes)


def tensor(name: str, shape: tuple[int, ...], sizes: dict[str, int]) -> Cut:
    """Shard the products of attention and of perceptrons over `tensor`, then as `fsdp` does."""
    axis = next((axis for regex, axis in PRODUCTS if re.fullmatch(regex, name)), None)
    cut: list[str | None] = [None] * len(shape)
    size = sizes["tensor"]
    if axis is not None and len(shape) >= -axis and size > 1 and shape[axis] % size == 0:
        cut[axis] = "tensor"
    return fsdp(name, shape, sizes, cut)


PRESETS = {"data_parallel": data_parallel, "fsdp": fsdp, "tensor": tensor}


def shard_bytes(leaf: Any, sharding: Sharding) -> int:
    """The bytes of a leaf that one device holds."""
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


# The mesh: all devices as `data` x `fsdp` x `tensor`. One device is a mesh of one.


def make_mesh(options: MeshOptions = ALL_DEVICES, devices: Devices | None = None) -> Mesh:
    """The mesh over all devices, or the given ones. Devices of one host are neighbours along the
    last axes, which exchange the most data."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(options, len(devices))
    if wrong := misfit(shape, devices):
        raise UserError(wrong)
    devices = devices[: math.prod(shape)]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def misfit(shape: Sequence[int], devices: Devices) -> str | None:
    """Why a mesh of this shape does not fit these devices, or None."""
    size, processes = math.prod(shape), jax.process_count()
    if size == len(devices) or (size < len(devices) and processes == 1):
        return None
    platform = devices[0].platform
    present = f"there {'are' if len(devices) > 1 else 'is'} {len(devices)} of {platform}"
    if processes > 1:
        present += f", in {processes} processes, each of which must have a share"
    fix = "-1 stands for all remaining devices; mesh.data=-1 mesh.fsdp=1 mesh.tensor=1 always fits"
    if platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={max(size // processes, 1)}"
        fix += f"; XLA_FLAGS={flag} simulates them"
    return f"mesh: {text_of_sizes(shape)} is {size} devices, and {present}; {fix}"


def mesh_shape(options: MeshOptions, count: int) -> tuple[int, ...]:
    """The three sizes for `count` devices. The last axis of -1 takes the devices that the other
    axes leave."""
    sizes = [getattr(options, axis) for axis in AXES]
    open_axes = [i for i, size in enumerate(sizes) if size == -1]
    sizes = [1 if size == -1 else size for size in sizes]
    if open_axes:
        fixed = math.prod(sizes)
        if fixed < count and count % fixed:
            raise UserError(
                f"mesh: {count} devices do not divide by {text_of_sizes(sizes)}, "
                "so there is no number for the -1"
            )
        sizes[open_axes[-1]] = max(count // fixed, 1)
    return tuple(sizes)


def text_of_sizes(shape: Sequence[int]) -> str:
    """A shape as a text, such as data 4 x fsdp 2 x tensor 1."""
    return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))


# Single arrays, put onto the devices, of which each process has some, and fetched.


def put_leaf(leaf: Any, sharding: Sharding) -> jax.Array:
    """One array on the devices. An array that is on devices already is moved between them; an array
    on disk is read by its method `placed`."""
    if hasattr(leaf, "placed"):
        return leaf.placed(sharding)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = put_leaf(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    # device_put would compare the values of all hosts: 0.6 s for 47 MB.
    array = np.asarray(leaf, dtype=jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def fetched(array: jax.Array) -> np.ndarray:
    """An array on the host. If several hosts hold parts of it, all of them must call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental.multihost_utils import process_allgather

    return process_allgather(array, tiled=True)
