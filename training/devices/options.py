"""The keys of a config that tell on which devices a run trains: `mesh`, `sharding` and `distributed`. They may change when a run
goes on."""

import difflib
import re
from dataclasses import dataclass

from training.options import check, is_list


@dataclass(frozen=True)
class MeshOptions:
    """How the devices are arranged; -1 is all that the other axes leave."""

    data: int = -1  # a batch is cut over these
    fsdp: int = 1  # a batch is cut over these too, and so are the weights
    tensor: int = 1  # the weights of products are cut over these

    def __post_init__(self):
        wrong = {
            name: size
            for name, size in vars(self).items()
            if type(size) is not int or size == 0 or size < -1
        }
        if wrong:
            raise ValueError(
                "\n".join(
                    f"{name}: must be a number from 1, or -1, got {size!r}"
                    for name, size in wrong.items()
                )
            )
        if self.fsdp == self.tensor == -1:
            raise ValueError("fsdp: is -1, and so is tensor; only one can be all that is left")


SHARDINGS = ("data_parallel", "fsdp", "tensor")


def check_sharding(given):
    """Refuse what is neither a preset, nor a list of rules that may end with one, in one ValueError."""
    if given is None or given in SHARDINGS:
        return
    form = "a preset ({}), or a list of [regex, [axis of the mesh or null, ...]]".format(
        ", ".join(SHARDINGS)
    )
    if isinstance(given, str) or not is_list(given):
        near = difflib.get_close_matches(str(given), SHARDINGS, n=1)
        raise ValueError(
            f"sharding: must be {form}, got {given!r}{f'; did you mean {near[0]!r}?' if near else ''}"
        )
    for i, rule in enumerate(given):
        if rule in SHARDINGS and i == len(given) - 1:
            continue
        sound = is_list(rule) and len(rule) == 2 and isinstance(rule[0], str) and is_list(rule[1])
        if not sound or not all(isinstance(axis, str | None) for axis in rule[1]):
            raise ValueError(
                f"sharding.{i}: must be [regex, [axis of the mesh or null, ...]], or at last a preset, got {rule!r}"
            )
        try:
            re.compile(rule[0])
        except re.error as error:
            raise ValueError(
                f"sharding.{i}: {rule[0]!r} is not a regular expression: {error}"
            ) from error


@dataclass(frozen=True)
class DistributedOptions:
    """Who else trains: what the environment tells (SLURM, Open MPI, Kubernetes, JAX_COORDINATOR_ADDRESS), unless said here."""

    coordinator: str | None = (
        None  # address:port of process 0; "auto": as JAX finds out (a TPU pod); "none": train alone
    )
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self):
        check(self, num_processes=1, process_id=0)
        told = (self.num_processes, self.process_id)
        word = self.coordinator in (None, "auto", "none")
        if word != (told == (None, None)) or (None in told and told != (None, None)):
            raise ValueError(
                "coordinator (an address), num_processes and process_id go together: give all three, or no number; "
                "'auto' and 'none' stand alone"
            )
        if not word and not re.fullmatch(r".+:\d{1,5}", self.coordinator):
            raise ValueError(
                f"coordinator: must be address:port, as 10.0.0.1:1234, got {self.coordinator!r}"
            )
        if not word and int(self.coordinator.rpartition(":")[2]) > 65535:
            raise ValueError(
                f"coordinator: a port is a number up to 65535, got {self.coordinator!r}"
            )
        if self.process_id is not None and self.process_id >= self.num_processes:
            raise ValueError(
                f"process_id: must be below num_processes, {self.num_processes}, got {self.process_id}"
            )
