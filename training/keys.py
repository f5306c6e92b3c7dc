"""Randomness by device or by host, for code of one's own under `jax.shard_map`.

Nothing in the toolkit needs it: in the one program over all devices a key belongs to the whole batch, so every example has its
own randomness, and it is the same whatever the number of devices. Under shard_map each device runs a program of its own on its
share, and the same key would draw the same numbers there.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

Mode = Literal[
    "unique_host_unique_device",
    "unique_host_same_device",
    "same_host_unique_device",
    "same_host_same_device",
]


def specialize_key(key, mode: Mode, mesh):
    """The key of this device under shard_map over all axes of a mesh: another for each host, each device of a host, or both."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode: must be one of {', '.join(get_args(Mode))}, got {mode!r}")
    hosts = np.array([device.process_index for device in mesh.devices.flat])
    # A device's number among those of its host, by its place in the mesh. Tables, so that all hosts compile the same program.
    locals_ = np.array([(hosts[:place] == host).sum() for place, host in enumerate(hosts)])
    place = jax.lax.axis_index(mesh.axis_names)
    if mode.startswith("unique_host"):
        key = jax.random.fold_in(key, jnp.asarray(hosts)[place])
    if mode.endswith("unique_device"):
        key = jax.random.fold_in(key, jnp.asarray(locals_)[place])
    return key
