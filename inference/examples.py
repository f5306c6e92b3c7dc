"""Real examples of a config's data, in the form that an exported function takes."""

import jax
import numpy as np

from data_loader.base import fingerprint, has_items
from data_loader.base import loaded as load_datasets
from data_loader.loader import collate, collated
from inference.load import prepare
from inference.lowering.trace import UNBATCHED, named
from inference.verify import rows_of, take
from utils import UserError


class Examples:
    """Batches of ({input: array}, targets); raises UserError if there is no usable data."""

    def __init__(self, exportable):
        if exportable.parts.data is None:
            raise UserError(exportable.data_error)
        if getattr(exportable.parts.model, "inputs", None):
            raise UserError("the model takes other inputs than those of the data")
        self.datasets, self.exportable = self.sets_of(exportable.parts), exportable
        self.test_set = self.datasets.get("test")
        self.check_shapes()

    @staticmethod
    def sets_of(parts):
        """The datasets, whose examples can all be read one by one."""
        datasets = load_datasets(parts.data, parts.loader)
        if not all(map(has_items, datasets.values())):
            raise UserError("data: comes in batches, so no single example can be read")
        return datasets

    def check_shapes(self):
        """Raise if the data's inputs do not have the shape that the model takes."""
        inputs, _ = self.batch(self.datasets["train"], [0])
        for name, leaf in named(self.exportable.inputs, "input").items():
            shape = inputs[name].shape[1:]
            if shape != leaf.shape:
                raise UserError(
                    f"the data's inputs have shape {shape}, the model takes {leaf.shape}"
                )

    @property
    def source(self):
        """Where the data comes from: its own description, or its name in the config."""
        return getattr(self.datasets["train"], "source", self.exportable.config["data"]["name"])

    def differs_from_training_data(self):
        """Whether the checkpoint was trained on other data than this."""
        trained_on = self.exportable.record.get("data", {}).get("train")
        return trained_on is not None and trained_on != fingerprint(self.datasets["train"])

    def first(self, count):
        """The first inputs of the test set, or of the training set if there is no test set."""
        dataset = self.datasets["train"] if self.test_set is None else self.test_set
        return self.batch(dataset, range(min(count, len(dataset))))[0]

    def spread(self, count):
        """Inputs of the training set at equal distances."""
        dataset = self.datasets["train"]
        count = min(count, len(dataset))
        return self.batch(dataset, [i * len(dataset) // count for i in range(count)])[0]

    def test_batches(self, size):
        """The test set, batch by batch."""
        for start in range(0, len(self.test_set), size):
            yield self.batch(self.test_set, range(start, min(start + size, len(self.test_set))))

    def batch(self, dataset, indices):
        collate_fn = self.exportable.parts.loader.of("test").collate_fn or collate
        batch = collated([dataset[i] for i in indices], collate_fn)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UserError("the data's examples are not (input, target) pairs")
        raw, targets = batch
        prepared = jax.tree.leaves(prepare(self.exportable.preprocess, self.exportable.form, raw))
        names = named(self.exportable.inputs, "input")
        if len(prepared) != len(names):
            found = ", ".join(named(raw, "input"))
            raise UserError(f"the data's inputs are {found}, the model takes {', '.join(names)}")
        return dict(zip(names, prepared, strict=True)), targets


class Rows:
    """Given examples, {input: array}, in place of a config's data."""

    test_set, source = None, "the example"

    def __init__(self, inputs, batch):
        self.inputs = inputs
        self.count = 1 if batch == UNBATCHED else rows_of(inputs)

    def first(self, count):
        """The first rows, or all if there is no batch."""
        return take(self.inputs, 0, count)

    def spread(self, count):
        """Rows at equal distances."""
        if self.count == 1:
            return self.inputs
        count = min(count, self.count)
        rows = np.arange(count) * self.count // count
        return {
            name: array[rows] if np.ndim(array) else array for name, array in self.inputs.items()
        }
