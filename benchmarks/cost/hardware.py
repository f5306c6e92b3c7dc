"""What accelerators can do, from their makers' documents; all figures are those of one device."""

from typing import NamedTuple


class Device(NamedTuple):
    name: str
    flops: dict  # peak per second of dense matrix products: {type that the model computes in: peak}
    memory: float  # bytes
    bandwidth: float  # bytes per second of that memory
    near: int  # the number of devices that the fast links connect: those of a host, or of a slice
    inside: float  # bytes per second that a device sends over the fast links, one way
    outside: float  # bytes per second that it sends to other devices


# H100, H200: "NVIDIA H100 Tensor Core GPU Datasheet" and "NVIDIA H200 Tensor Core GPU Datasheet",
# SXM columns, dense: half of the printed figures, which are with sparsity. float32 means TF32
# products, which JAX uses when they are enabled. NVLink's 900 GB/s is the sum of both directions.
# "NVIDIA DGX H100/H200 System User Guide": 8 GPUs, each with a ConnectX-7 of 400 Gbit/s.
# v5e, v5p: "TPU v5e" and "TPU v5p" in the Cloud TPU documentation. The printed interconnect of 400
# and 1,200 GB/s is the sum of both directions. Beyond a slice (256 or 6,144 chips), traffic uses
# the data centre's network: 6.4 Tbit/s per pod of v5e, 50 Gbit/s per chip of v5p. float32 products
# use one pass of bfloat16, JAX's default there.
H100, H200 = {"bfloat16": 989e12, "float32": 494e12}, {"bfloat16": 989e12, "float32": 494e12}
V5E, V5P = {"bfloat16": 197e12, "float32": 197e12}, {"bfloat16": 459e12, "float32": 459e12}
DEVICES = {
    device.name: device
    for device in (
        Device("H100", H100, 80e9, 3.35e12, 8, 450e9, 50e9),
        Device("H200", H200, 141e9, 4.8e12, 8, 450e9, 50e9),
        Device("v5e", V5E, 16e9, 819e9, 256, 200e9, 6.4e12 / 8 / 256),
        Device("v5p", V5P, 95e9, 2765e9, 6144, 600e9, 50e9 / 8),
    )
}


def link(device, members, stride):
    """Bytes per second that each member of a group sends; members are `stride` devices apart. In a
    group that spans hosts, the members on a host share its outside links, one ring for each."""
    if members * stride <= device.near:
        return device.inside
    return min(device.inside, max(device.near // stride, 1) * device.outside)
