"""Where arrays live: a mesh over the local devices, batches sharded over its `data` axis, everything else replicated."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from utils import UserError


def make_mesh(batch_size):
    """One axis, `data`, over all local devices; one device is just a mesh of one."""
    devices = jax.local_devices()
    if batch_size % len(devices):
        raise UserError(
            f"loader.batch_size: {batch_size} examples do not divide over {len(devices)} devices; "
            f"take a multiple, such as {-(-batch_size // len(devices)) * len(devices)}"
        )
    return Mesh(devices, ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh):
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def sharded(mesh, axis=0):
    """The array cut along one axis, over the devices of `data`."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, "data"))
