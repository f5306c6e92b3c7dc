"""A run as observers see it: everything can be read, nothing can be set."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jax
import numpy as np
from jaxtyping import PyTree

from data_loader.base import Tokenizer
from data_loader.tokenizers.saved import from_json
from model.generate import Sampling, generate
from training.devices.sharding import fetched
from training.objective import outputs, with_precision
from training.processes import several
from training.recipe import Recipe
from training.run import Run
from training.watching.publish import Publisher
from utils import UserError

# What a Run has besides, which is not for observers.
HIDDEN = {"trainer", "best", "restored", "evaluated_weights", "record", "go_to", "published"}


class View:
    """The read-only attributes and methods of a run, as observers see them:
    epoch, epochs (or None), step (in all), position (steps taken in the epoch), steps (in an epoch,
                   or None)
    metrics        the values of the latest log line, within an epoch or at its end; with replicas,
                   their means
    history        one row per epoch
    arrays         the results of CONCAT metrics and of the callbacks' own, from the latest
                   evaluation of each set; of the first replica
    per_step       {name: array} of each step since the last log line, and "step", if needed
    evaluated      the held-out sets of the latest evaluation
    row            the latest row of an epoch or an evaluation: its values by name
    sets           {name: dataset}, raw
    folder         the folder of the run, or None
    config         the resolved config; in a run of `fit`, its options and its `config`
    publish        shows pictures in the report and on trackers, histograms and texts on trackers:
                   publish.image(view.step, name, array)
    params, state  a copy of the params that are evaluated, and of their running statistics
    model          the Model: model.apply(view.params, view.state, x) -> (output, state)
    apply(x)       the model's output for a batch, with the params that are evaluated; compiled once
    predict(x)     the same for a batch of raw inputs, which are preprocessed first
    states()       the TrainState of each replica; the next step reuses the memory of its arrays
    generate(prompts, tokens, sampling, seed=0, stop=None)  what a language model writes after
                   prompts, arrays of tokens (see model/generate.py)
    sample(labels, seed=0, ...)  examples from a model that is trained to make them, by the options
                   of its objective (see model/diffusion.py)
    learning_rate()  {name: value} at the latest step, where known
    classes        the names of the classes, or None
    tokenizer      the one that made the tokens, or None
    first_examples(count)  the first examples of training, shuffled as in its first epoch: raw, or
                   preprocessed and augmented if there are augmentations; None where single examples
                   cannot be read
    """

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        learning_rate: Callable[[], dict[str, float]],
        *,
        sets: Mapping[str, Any],
        folder: Path | None,
        config: dict[str, Any],
        publish: Publisher,
        classes: Sequence[str] | None,
        tokenizer: str | None,
    ) -> None:
        model = with_precision(recipe.model, recipe.training.precision)
        vars(self).update(
            model=recipe.model,
            learning_rate=learning_rate,
            sets=MappingProxyType(sets),
            folder=folder,
            publish=publish,
            classes=classes,
            _run=run,
            _recipe=recipe,
            _config=config,
            _tokenizer=tokenizer,
            _writer=model,
            _apply=jax.jit(partial(outputs, model, ())),
            _predict=jax.jit(partial(outputs, model, recipe.preprocess)),
        )

    @property
    def config(self) -> dict[str, Any]:
        return deepcopy(self._config)

    @property
    def history(self) -> tuple[dict[str, Any], ...]:
        return tuple(dict(row) for row in self._run.history)

    @property
    def per_step(self) -> dict[str, np.ndarray]:
        each = self._run.each_step
        return {name.removeprefix("train_"): array for name, array in each.items()}

    @cached_property
    def tokenizer(
        self,
    ) -> Tokenizer | None:  # made only if a callback uses it, since that may take a second
        return self._tokenizer and from_json(self._tokenizer)

    def apply(self, x: PyTree) -> PyTree:
        return self._apply(*self._run.evaluated_weights(), x)

    def first_examples(self, count: int) -> list[Any] | None:
        return self._recipe.first_examples(self.sets["train"], count)

    def predict(self, x: PyTree) -> PyTree:
        return self._predict(*self._run.evaluated_weights(), x)

    def generate(
        self,
        prompts: Sequence[Any],
        tokens: int,
        sampling: Sampling | None = None,
        *,
        seed: int = 0,
        stop: int | None = None,
    ) -> list[np.ndarray]:
        params, state = self._whole_weights()
        options = {"state": state, "seed": seed, "stop": stop}
        return generate(self._writer, params, prompts, tokens, sampling, **options)

    def sample(self, labels: Any, *, seed: int = 0, **options: Any) -> PyTree:
        make = self._recipe.objective.sample
        if make is None:
            raise UserError(
                "callbacks: the objective makes no samples, as denoising_diffusion does"
            )
        params, state = self._whole_weights()
        return make(params, jax.random.key(seed), labels, state=state, **options)

    def _whole_weights(self) -> tuple[PyTree, PyTree]:
        """The weights that are evaluated; with several processes, each has all of them."""
        weights = self._run.evaluated_weights()
        if several():  # each process makes the same one
            return jax.device_put(jax.tree.map(fetched, weights), jax.local_devices()[0])
        return weights

    def __dir__(self) -> list[str]:
        names = {*super().__dir__(), *dir(self._run)} - HIDDEN
        return [name for name in names if not name.startswith("_")]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in dir(self):
            names = ", ".join(sorted(dir(self)))
            raise AttributeError(f"a callback sees no {name!r} of a run; there are {names}")
        value = getattr(self._run, name)
        return MappingProxyType(dict(value)) if name in ("metrics", "arrays") else value

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"a callback only reads the run, so {name!r} cannot be set; "
            "return {'stop': True} or {'lr_scale': x}"
        )
