"""What accelerators can do, from their makers' documents; everything is that of one device."""

from typing import NamedTuple


class Device(NamedTuple):
    name: str
    flops: dict  # a second at the peak of dense products, by the type that the model computes in
    memory: float  # bytes
    bandwidth: float  # bytes a second, of that memory
    near: int  # devices that the fast links join: those of a host, or of a slice
    inside: float  # bytes a second that it sends over these, one way
    outside: float  # and to others


# "NVIDIA H100 Tensor Core GPU Datasheet" and "NVIDIA H200 Tensor Core GPU Datasheet", the SXM columns, dense: half of what is
# printed with sparsity; float32 are TF32 products, which JAX takes where it is asked for. NVLink's 900 GB/s count both ways.
# "NVIDIA DGX H100/H200 System User Guide": 8 GPUs, a ConnectX-7 of 400 Gbit/s for each.
# "TPU v5e" and "TPU v5p", of the Cloud TPU documentation: interconnect is given both ways as 400 and 1,200 GB/s. Beyond a slice,
# of 256 chips or 6,144, goes the data centre's network: 6.4 Tbit/s a pod of v5e, 50 Gbit/s a chip of v5p. float32 products are
# taken in one pass of bfloat16, JAX's default there.
DEVICES = {
    device.name: device
    for device in (
        Device("H100", {"bfloat16": 989e12, "float32": 494e12}, 80e9, 3.35e12, 8, 450e9, 50e9),
        Device("H200", {"bfloat16": 989e12, "float32": 494e12}, 141e9, 4.8e12, 8, 450e9, 50e9),
        Device(
            "v5e",
            {"bfloat16": 197e12, "float32": 197e12},
            16e9,
            819e9,
            256,
            200e9,
            6.4e12 / 8 / 256,
        ),
        Device("v5p", {"bfloat16": 459e12, "float32": 459e12}, 95e9, 2765e9, 6144, 600e9, 50e9 / 8),
    )
}


def link(device, members, stride):
    """Bytes a second that each member of a group sends: the group's members stand `stride` devices apart. Where it spans hosts, a
    host's members share its way out, a ring for each of them."""
    if members * stride <= device.near:
        return device.inside
    return min(device.inside, max(device.near // stride, 1) * device.outside)
