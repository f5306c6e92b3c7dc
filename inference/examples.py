"""Real examples of a config's data, as an exported function takes them."""

import jax
import numpy as np

from data_loader.base import loaded
from data_loader.loader import fingerprint
from inference.load import prepared
from inference.lowering.trace import named
from utils import UserError


class Examples:
    """Batches of ({input: array}, targets); raises UserError where there are none."""

    def __init__(self, shipped):
        if shipped.parts.data is None:
            raise UserError(shipped.why)
        self.sets, self.shipped = loaded(shipped.parts.data), shipped
        self.tested = self.sets.get("test")
        self.check_shapes()

    def check_shapes(self):
        """Refuse data of another shape than the model is to have."""
        inputs, _ = self.batch(self.sets["train"], [0])
        for name, leaf in named(self.shipped.inputs, "input").items():
            if inputs[name].shape[1:] != leaf.shape:
                raise UserError(
                    f"the data's inputs have the shape {inputs[name].shape[1:]}, the model takes {leaf.shape}"
                )

    @property
    def source(self):
        """Where they come from, if the data says so."""
        return getattr(self.sets["train"], "source", self.shipped.config["data"]["name"])

    @property
    def classes(self):
        """The names of the classes, where the data has some."""
        return getattr(self.sets["train"], "classes", None)

    def other_than_trained_on(self):
        """Whether the checkpoint remembers other training data."""
        before = self.shipped.record.get("data", {}).get("train")
        return before is not None and before != fingerprint(self.sets["train"])

    def first(self, count):
        """Of the test set, or of the training set where there is no other."""
        dataset = self.sets["train"] if self.tested is None else self.tested
        return self.batch(dataset, range(min(count, len(dataset))))[0]

    def spread(self, count):
        """Some of the training set, from its first to its last."""
        dataset = self.sets["train"]
        count = min(count, len(dataset))
        return self.batch(dataset, [i * len(dataset) // count for i in range(count)])[0]

    def tests(self, size):
        """The test set, batch by batch."""
        for start in range(0, len(self.tested), size):
            yield self.batch(self.tested, range(start, min(start + size, len(self.tested))))

    def batch(self, dataset, places):
        examples = [dataset[i] for i in places]
        if not isinstance(examples[0], tuple):
            raise UserError("the data's examples are no pairs (input, target)")
        raw, targets = (
            jax.tree.map(lambda *leaves: np.stack(leaves), *side)
            for side in zip(*examples, strict=True)
        )
        return named(prepared(self.shipped.preprocess, self.shipped.form, raw), "input"), targets
