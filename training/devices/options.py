"""The config keys that say on which devices a run trains: `mesh`, `sharding` and `distributed`.

A run may be resumed with other values of them.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from utils.forms import Count, CountOrZero, Range, check_options, form, regex

AxisSize = Literal[-1] | Annotated[int, Range("an integer of at least 1, or -1", minimum=1)]


@dataclass(frozen=True)
class MeshOptions:
    """How many devices lie along each axis of the mesh; -1 means all that the other axes leave."""

    data: AxisSize = -1  # batches are cut along this axis
    fsdp: AxisSize = 1  # batches are cut along this axis too, and so are the params
    tensor: AxisSize = 1  # the weights of matrix products are cut along this axis

    def __post_init__(self) -> None:
        check_options(self)
        if self.fsdp == self.tensor == -1:
            raise ValueError("fsdp: is -1, and so is tensor; only one of them can be -1")


Preset = Literal["data_parallel", "fsdp", "tensor"]
# the axis of the mesh along which each axis of the leaves that a regex matches is cut
ShardingRule = tuple[str, tuple[str | None, ...]]
Sharding = Preset | tuple[ShardingRule | Preset, ...] | None


def check_sharding(value: Any) -> None:
    """Raise unless `sharding` is null, a preset, or a list of rules that may end with a preset."""
    rules = form(Sharding).read(value, "sharding")
    for i, rule in enumerate(rules if isinstance(rules, tuple) else ()):
        if not isinstance(rule, str):
            regex(**{f"sharding.{i}": rule[0]})
        elif i < len(rules) - 1:
            raise ValueError(f"sharding.{i}: a preset must be the last in the list, got {rule!r}")


@dataclass(frozen=True)
class DistributedOptions:
    """The processes that train together; where no key is given, the environment decides.

    It does so by the variables of SLURM, Open MPI, Kubernetes, or JAX_COORDINATOR_ADDRESS.
    """

    # address:port of process 0; "auto": JAX finds it (a TPU pod); "none": this process trains alone
    coordinator: str | None = None
    num_processes: Count | None = None  # how many processes train together
    process_id: CountOrZero | None = None  # the number of this process, from 0

    def __post_init__(self) -> None:
        check_options(self)
        address = None if self.coordinator in ("auto", "none") else self.coordinator
        given = [each is not None for each in (address, self.num_processes, self.process_id)]
        if any(given) != all(given):
            keys = "coordinator (an address), num_processes and process_id"
            fix = "give all three or none of them; with 'auto' or 'none' give no numbers"
            raise ValueError(f"{keys} go together: {fix}")
        if address is None or self.num_processes is None or self.process_id is None:
            return
        if not re.fullmatch(r".+:\d{1,5}", address):
            form = "address:port, such as 10.0.0.1:1234"
            raise ValueError(f"coordinator: must be {form}, got {address!r}")
        if int(address.rpartition(":")[2]) > 65535:
            raise ValueError(f"coordinator: the port must be at most 65535, got {address}")
        if self.process_id >= self.num_processes:
            limit = f"below num_processes, {self.num_processes}"
            raise ValueError(f"process_id: must be {limit}, got {self.process_id}")
