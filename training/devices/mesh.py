"""The mesh: all devices as `data` x `fsdp` x `tensor`. One device is a mesh of one."""

import math

import jax
from jax.sharding import AbstractMesh, AxisType

from training.devices.options import MeshOptions
from utils import UserError

AXES = ("data", "fsdp", "tensor")


def make_mesh(options=MeshOptions(), devices=None):  # noqa: B008
    """The mesh over all devices, or the given ones. Devices of one host are neighbours along the
    last axes, which exchange the most data."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(options, len(devices))
    if wrong := misfit(shape, devices):
        raise UserError(wrong)
    devices = devices[: math.prod(shape)]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def mesh_on_paper(options):
    """The mesh; one that does not fit this machine has no devices."""
    shape = mesh_shape(options, jax.device_count())
    return AbstractMesh(shape, AXES) if misfit(shape, jax.devices()) else make_mesh(options)


def misfit(shape, devices):
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


def mesh_shape(options, count):
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


def text_of_sizes(shape):
    """A shape as a text, such as data 4 x fsdp 2 x tensor 1."""
    return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
