"""Where arrays live: a mesh over the local devices, batches sharded over its `data` axis, everything else replicated."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from utils import UserError


def make_mesh():
    """One axis, `data`, over all local devices; one device is just a mesh of one."""
    return Mesh(jax.local_devices(), ("data",), axis_types=(AxisType.Auto,))


def check_divides(size, mesh):
    """Every device takes the same share of a batch."""
    devices = mesh.size
    if size % devices:
        raise UserError(
            f"loader.batch_size: {size} examples do not divide over {devices} devices; "
            f"take a multiple, such as {-(-size // devices) * devices}"
        )


def replicated(mesh):
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def sharded(mesh, axis=0):
    """The array cut along one axis, over the devices of `data`."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, "data"))
