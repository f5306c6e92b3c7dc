"""From what was added up to named values: `<set>_<metric>`, and the norms by their own names."""

from typing import NamedTuple

import jax
import numpy as np

from training.tally import results
from utils import named_leaves


class Reader(NamedTuple):
    """Names the values of a run; `hidden` are the labels that callbacks measure for themselves, `leaves` the names of weights."""

    finish: object = lambda means: means  # of the objective
    hidden: frozenset = frozenset()
    leaves: tuple = ()

    def values(self, prefix, tallies):
        """{"train_loss": ...} from the tally of each replica; with several, the mean, and each as `train_loss/0`."""
        read = [self.read(tally) for tally in tallies]
        replicas = [
            {f"{prefix}_{name}": float(value) for name, value in shown.items()}
            for shown, _, _ in read
        ]
        return together(replicas) | mean_of([norms for _, _, norms in read])

    def arrays(self, prefix, tallies):
        """{"test_confusion": ...}: what is there for callbacks alone, of the first replica."""
        return {f"{prefix}_{label}": value for label, value in self.read(tallies[0])[1].items()}

    def each_step(self, rings, steps):
        """The values of single steps, an array each: {"train_loss": ...}; `rings` are those of each replica."""
        places = np.asarray(steps) % len(rings[0]["examples"])
        read = [self.read(jax.tree.map(lambda a: a[places], ring), jax.vmap) for ring in rings]
        replicas = [
            {f"train_{name}": np.asarray(value) for name, value in shown.items()}
            for shown, _, _ in read
        ]
        return together(replicas) | mean_of([norms for _, _, norms in read])

    def read(self, tally, over=lambda fn: fn):
        """({name: number} of what is logged, {label: array} of what is for callbacks alone, {norm: its mean over the steps})"""
        found, norms = results(tally)
        aside = {
            label
            for label, entry in tally["values"].items()
            if label in self.hidden or "CONCAT" in entry
        }
        shown = {
            label: value for label, value in found.items() if label not in aside and label != "loss"
        }
        shown = {"loss": found["loss"], **(over(self.finish)(shown) if shown else {})}
        leaves = [
            pair for label, value in shown.items() for pair in named_leaves({label: value}).items()
        ]  # the loss stays first
        named = {leaf.replace("/", "_"): value for leaf, value in leaves}
        return named, {label: found[label] for label in aside}, self.norms(norms)

    def norms(self, found):
        """{"gradient_norm": ..., "gradient_norm/head/bias": ...}"""
        named = {name: value for name, value in found.items() if not name.endswith("_leaves")}
        for name in found.keys() - named.keys():
            named |= {
                f"{name.removesuffix('_leaves')}/{leaf}": found[name][..., i]
                for i, leaf in enumerate(self.leaves)
            }
        return named


def together(replicas):
    """Each value as the mean over the replicas, and, where there are several, that of each."""
    named = mean_of(replicas)
    if len(replicas) > 1:
        named |= {
            f"{name}/{r}": value
            for name in replicas[0]
            for r, value in enumerate(x[name] for x in replicas)
        }
    return named


def mean_of(replicas):
    """Each value as the mean over the replicas."""
    if len(replicas) == 1:
        return {
            name: value if np.ndim(value) else float(value) for name, value in replicas[0].items()
        }
    return {name: mean([r[name] for r in replicas]) for name in replicas[0]}


def mean(values):
    """A float of numbers, an array of arrays."""
    found = np.mean(values, axis=0)
    return found if found.ndim else float(found)
