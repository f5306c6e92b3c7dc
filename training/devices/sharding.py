"""Where arrays live: a mesh of all devices, batches cut over its `data` and `fsdp` axes, weights by rules, all else replicated.

A rule is [regex, [axis of the mesh or null, ...]]: it cuts each axis of the leaves that match, the first rule that does counts,
axes that it leaves out stay whole. A preset is a function that answers the same from a leaf's name and shape. The optimizer's
state and averaged weights are cut as the weights are that they belong to.
"""

import difflib
import math
import re
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from training.devices.options import MeshOptions, check_sharding
from utils import UserError, map_named, match_rules, named_leaves

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")  # the axes that a batch is cut over
SMALL = (
    2**10
)  # numbers: `fsdp` leaves such leaves whole, since each cut has the price of an exchange

# What `tensor` cuts: of two products in a row, the first one's columns and the second one's rows, so that devices meet only after
# both (Shoeybi et al., 2019). The number is the axis, counted from the last.
PRODUCTS = (
    (r"(.*/)?(query|key|value|expand)/(weight|bias)", -1),
    (r"(.*/)?(out|project)/weight", -2),
    (r"(.*/)?hidden/\d*[02468]/(weight|bias)", -1),
    (r"(.*/)?hidden/\d*[13579]/weight", -2),
)


def make_mesh(options=MeshOptions(), devices=None):  # noqa: B008
    """The devices as `data` x `fsdp` x `tensor`; one device is just a mesh of one. Devices of one host stand side by side in the
    last axes, where most is exchanged."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(options, len(devices))
    if wrong := misfit(shape, devices):
        raise UserError(wrong)
    return jax.make_mesh(
        shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[: math.prod(shape)]
    )


def mesh_on_paper(options):
    """(the mesh, what is wrong with it here): without its devices where this machine has not so many."""
    shape = mesh_shape(options, jax.device_count())
    wrong = misfit(shape, jax.devices())
    return (AbstractMesh(shape, AXES), wrong) if wrong else (make_mesh(options), None)


def misfit(shape, devices):
    """What is wrong with a mesh of this shape over these devices, or None."""
    size, processes = math.prod(shape), jax.process_count()
    if size == len(devices) or (size < len(devices) and processes == 1):
        return None
    there = f"there {'are' if len(devices) > 1 else 'is'} {len(devices)} of {devices[0].platform}"
    several = f", in {processes} processes that must each have a share" if processes > 1 else ""
    flag = f"; XLA_FLAGS=--xla_force_host_platform_device_count={max(size // processes, 1)} simulates them"
    simulated = flag if devices[0].platform == "cpu" else ""
    return (
        f"mesh: {in_words(shape)} is {size} devices, and {there}{several}; -1 stands for all the rest, and any mesh will do, as "
        f"mesh.data=-1 mesh.fsdp=1 mesh.tensor=1{simulated}"
    )


def mesh_shape(options, count):
    """The three sizes; an axis of -1 takes what the others leave of `count` devices. Of several, the last one does."""
    sizes = [getattr(options, axis) for axis in AXES]
    open_axes = [i for i, size in enumerate(sizes) if size == -1]
    sizes = [1 if size == -1 else size for size in sizes]
    if open_axes:
        fixed = math.prod(sizes)
        if fixed < count and count % fixed:
            raise UserError(
                f"mesh: {count} devices do not divide by {in_words(sizes)}, so there is no number for the -1"
            )
        sizes[open_axes[-1]] = max(count // fixed, 1)
    return tuple(sizes)


def in_words(shape):
    """data 4 x fsdp 2 x tensor 1."""
    return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))


def check_divides(size, mesh):
    """Every device takes the same share of a batch."""
    parts = math.prod(mesh.shape[axis] for axis in BATCH)
    if size % parts:
        raise UserError(
            f"loader.batch_size: {size} examples do not divide over {parts} devices; "
            f"take a multiple, such as {-(-size // parts) * parts}, or another mesh"
        )


def replicated(mesh):
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def sharded(mesh, axis=0):
    """An array of examples cut along one axis."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, BATCH))


class Plan(NamedTuple):
    """How the weights of a run are cut; `stacked` says that every leaf has one more axis in front, of replicas."""

    mesh: Mesh
    rules: object = None  # as the config has them
    stacked: bool = False

    def cuts(self, params):
        """{name: the axes of the mesh that its axes are cut over} of weights, or their shapes."""
        leaves = named_leaves(params)
        found = cuts_by(self.rules, leaves, dict(self.mesh.shape))
        if self.mesh.shape["tensor"] > 1 and not any("tensor" in cut for cut in found.values()):
            raise UserError(
                f"mesh.tensor: {self.mesh.shape['tensor']} devices would all do the same work, for no leaf is cut over them; "
                f'write rules into `sharding`, as [["head/weight", [null, "tensor"]]]; the leaves are {", ".join(leaves)}'
            )
        return found

    def of_params(self, params):
        """Where each leaf of the weights lives."""
        cuts = self.cuts(params)
        return map_named(lambda name, _: self.place(cuts[name]), params)

    def of_state(self, ts):
        """The same of a TrainState of arrays or shapes, in which the replicas are not stacked."""
        cuts, shapes = (
            self.cuts(ts.params),
            {name: leaf.shape for name, leaf in named_leaves(ts.params).items()},
        )

        def place(name, leaf):
            owner = (
                None
                if name.split("/")[0] in ("state", "sums")
                else owner_of(name, leaf.shape, shapes)
            )
            return self.place(cuts[owner] if owner else ())

        return map_named(place, ts)

    def place(self, cut=()):
        """Where a leaf cut like this lives."""
        return NamedSharding(self.mesh, PartitionSpec(*(None,) * self.stacked, *cut))


def owner_of(name, shape, shapes):
    """The leaf of the weights that one of an optimizer's state belongs to: its name ends alike, as in opt/m/head/weight."""
    parts = name.split("/")
    ends = ("/".join(parts[i:]) for i in range(1, len(parts)))
    return next((end for end in ends if shapes.get(end) == shape), None)


def cuts_by(rules, leaves, sizes):
    """{name: its cut} by rules, or a preset's name, or both: a preset may stand last in the list, for all that no rule names."""
    check_sharding(rules)
    rules = default_preset(sizes) if rules is None else rules
    rules = [rules] if isinstance(rules, str) else list(rules)
    preset = PRESETS[rules.pop() if rules and isinstance(rules[-1], str) else "data_parallel"]
    try:
        found = match_rules([(regex, tuple(cut)) for regex, cut in rules], leaves)
    except UserError as error:
        raise UserError(f"sharding: {error}") from error
    for name, cut in found.items():
        if cut is not None:
            check_cut(name, leaves[name].shape, cut, sizes)
    return {
        name: preset(name, leaves[name].shape, sizes) if cut is None else cut
        for name, cut in found.items()
    }


def default_preset(sizes):
    """What a mesh of these sizes is for."""
    return "tensor" if sizes["tensor"] > 1 else "fsdp" if sizes["fsdp"] > 1 else "data_parallel"


def check_cut(name, shape, cut, sizes):
    """Refuse a rule that does not fit a leaf."""
    where = f"sharding: {name} {tuple(shape)}"
    for axis in cut:
        if axis is not None and axis not in sizes:
            near = difflib.get_close_matches(axis, AXES, n=1)
            raise UserError(
                f"{where}: the mesh has no axis {axis!r}{f'; did you mean {near[0]!r}?' if near else ''} {AXES}"
            )
    if len(cut) > len(shape):
        raise UserError(
            f"{where}: the rule names {len(cut)} axes, {list(cut)}, and the leaf has {len(shape)}; make it one for fewer leaves, "
            'as ".*/weight"'
        )
    for i, axis in enumerate(cut):
        if axis is None:
            continue
        if cut.count(axis) > 1:
            raise UserError(
                f"{where}: the rule cuts two axes over {axis!r}, {list(cut)}; each can be cut over another one"
            )
        if shape[i] % sizes[axis]:
            raise UserError(
                f"{where}: its axis {i} of {shape[i]} does not divide over mesh.{axis}, which is {sizes[axis]}"
            )


def data_parallel(name, shape, sizes):
    """Every device holds all weights."""
    return ()


def fsdp(name, shape, sizes, cut=()):
    """The largest axis that divides, and is not cut yet, over `fsdp`; each device holds its part of everything."""
    cut = [*cut, *[None] * (len(shape) - len(cut))]
    free = [i for i, size in enumerate(shape) if cut[i] is None and size % sizes["fsdp"] == 0]
    if math.prod(shape) > SMALL and free and sizes["fsdp"] > 1:
        cut[max(free, key=lambda i: shape[i])] = "fsdp"
    return tuple(cut)


def tensor(name, shape, sizes):
    """The products of attention and of perceptrons over `tensor`, as PRODUCTS has them; then as `fsdp`."""
    axis = next((axis for regex, axis in PRODUCTS if re.fullmatch(regex, name)), None)
    cut = [None] * len(shape)
    if (
        axis is not None
        and len(shape) >= -axis
        and sizes["tensor"] > 1
        and shape[axis] % sizes["tensor"] == 0
    ):
        cut[axis] = "tensor"
    return fsdp(name, shape, sizes, cut)


PRESETS = {"data_parallel": data_parallel, "fsdp": fsdp, "tensor": tensor}


def shard_bytes(leaf, sharding):
    """What one device holds of a leaf."""
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
