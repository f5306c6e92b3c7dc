"""--find-batch: the largest batch that fits, and the speed of each size that was tried."""

import gc
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from data_loader.base import length
from training.base import Parts
from training.commands.find_lr import ready
from training.engine import Trainer
from training.recipe import Recipe
from training.watching.console import silenced
from utils import DONE, RunError, format_bytes, is_out_of_memory, main_memory

SECONDS = 0.5  # the least time of the steps that are timed
LONGEST = 30  # seconds of a step, after which no larger size is tried
USABLE = 0.9  # of the memory; the rest is for arrays that are not counted
NEARLY = 0.95  # of the best speed
CLOSE = 1.125  # the bisection ends when two sizes are this close
MOST = 2**20  # examples in a batch, where the length of the data is unknown


class Tried(NamedTuple):
    """A size of the batch that was tried; `speed` is None if it does not fit."""

    size: int
    needs: int | None  # bytes of a device, if known
    speed: float | None  # examples per second


@silenced()
def find_batch(parts: Parts) -> int:
    """Print the memory and speed of a step for growing sizes of the batch, and suggest one."""
    recipe, sets = ready(parts)
    tokens = getattr(sets["train"], "tokens_per_example", None) or 1
    what, memory = "tokens" if tokens > 1 else "examples", memory_limit()
    limit = format_bytes(int(USABLE * memory))
    print(f"A step may need up to {limit} of memory on a device")
    print(f"{'batch':>8}  {'memory':>10}  {what + '/s':>12}")

    def attempt(size: int) -> Tried:
        one = tried(recipe._replace(loader=replace(recipe.loader, batch_size=size)), sets, memory)
        speed = "does not fit" if one.speed is None else f"{one.speed * tokens:,.0f}"
        needs = "" if one.needs is None else format_bytes(one.needs)
        print(f"{size:>8}  {needs:>10}  {speed:>12}", flush=True)
        return one

    # Each microbatch is cut into parts for the devices.
    unit = recipe.plan.parts_of_batch * recipe.training.accumulate
    examples = length(sets["train"])
    most = max(unit, (MOST if examples is None else examples) // unit * unit)
    all_tried = search(attempt, recipe.loader.batch_size, unit, most)
    speeds = {one.size: one.speed for one in all_tried if one.speed is not None}
    if not speeds:
        raise RunError("--find-batch: no batch fits; take a smaller model, or training.precision")
    largest, best = max(speeds), max(speeds.values())
    enough = min(size for size, speed in speeds.items() if speed >= NEARLY * best)
    why = " (the whole training set)" if largest == most else ""
    print(f"The largest that fits: {largest}{why}")
    print(f"Suggestion: loader.batch_size={enough}; larger ones are hardly faster")
    print("Another batch size needs another learning rate, which --find-lr suggests")
    return DONE


def search(attempt: Callable[[int], Tried], first: int, unit: int, most: int) -> list[Tried]:
    """Everything that was tried: doubled from the first size, or halved until it fits, and then
    bisected between the largest that fits and the smallest that does not."""
    size = min(max(first // unit, 1) * unit, most)
    done, fits, too_large = [attempt(size)], 0, None
    while True:
        one = done[-1]
        if one.speed is not None:
            fits = one.size
            if one.size / one.speed > LONGEST:
                return done
        else:
            too_large = one.size
        if too_large is None:
            size = min(2 * fits, most)
        elif fits:
            size = (fits + too_large) // 2 // unit * unit
        else:
            size = too_large // 2 // unit * unit
        close = too_large is not None and fits and too_large <= CLOSE * fits
        if close or size <= fits or size in (too_large, 0):
            return done
        done.append(attempt(size))


def tried(recipe: Recipe, sets: dict[str, Any], memory: float) -> Tried:
    """The Tried of a recipe: compile it, compare it with the memory, and run it if it may fit."""
    size, needs = recipe.loader.batch_size, None
    try:
        with closing(Trainer(recipe, sets)) as trainer:
            trainer.start()
            trainer.begin(1)
            trainer.prepare()
            memory_of_step = trainer.memory()
            if "step" in memory_of_step:
                needs = sum(memory_of_step.values())
            fits = needs is None or needs <= USABLE * memory
            return Tried(size, needs, speed_of(trainer, size) if fits else None)
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Tried(size, needs, None)
    finally:
        gc.collect()  # before the next size takes its memory


def speed_of(trainer: Trainer, size: int) -> float:
    """Examples per second, of all replicas."""
    jax.block_until_ready(trainer.train(1)[1])
    epoch, count, taken, seconds = 1, 1, 0, 0.0
    while seconds < SECONDS:
        began = time.perf_counter()
        steps, calls = trainer.train(count)
        if not steps:
            epoch += 1
            trainer.begin(epoch)
            continue
        jax.block_until_ready(calls)
        seconds, taken, count = seconds + time.perf_counter() - began, taken + steps, 2 * count
    return taken * size * len(trainer.seeds) / seconds


def memory_limit() -> float:
    """The bytes of a device that can be used: on the CPU, the free main memory."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if jax.default_backend() != "cpu" and "bytes_limit" in stats:
        return stats["bytes_limit"]
    free = main_memory()
    with (
        suppress(OSError, ValueError, StopIteration),
        open("/proc/meminfo", encoding="ascii") as file,
    ):
        line = next(line for line in file if line.startswith("MemAvailable:"))
        free = min(free, int(line.split()[1]) * 1024)
    return free / len(jax.local_devices())
