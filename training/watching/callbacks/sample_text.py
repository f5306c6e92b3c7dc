"""Let a language model write while it is trained."""

import json
import logging
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from data_loader.base import Tokenizer
from data_loader.tokenizers.saved import first_tokens
from model.base import Model
from model.generate import Sampling, check, context_of
from training.base import Callback
from training.observers import EVERY_EPOCH, Every
from training.watching.callbacks.common import append_lines, cut_back
from training.watching.view import View
from utils import UserError
from utils.forms import Count, CountOrZero, NonNegative, Range, checked

logger = logging.getLogger("main")

FILE = "samples.jsonl"
SHOWN = 3  # samples of a step in the log; all of them are in the file
WIDTH = 120  # characters of a sample in the log

Probability = Annotated[float, Range("above 0 and at most 1", exclusiveMinimum=0, maximum=1)]


@checked
def sample_text(
    prompts: tuple[str, ...] = ("",),
    tokens: Count = 200,
    temperature: NonNegative = 1.0,
    top_k: Count | None = None,
    top_p: Probability | None = None,
    seed: CountOrZero = 0,
    every: Every = EVERY_EPOCH,
    tokenizer: Tokenizer | None = None,
) -> Callback:
    """Let the model continue each of `prompts`, and show the texts.

    It does so as often as `every` says, after each epoch or after so many steps. The prompt ""
    begins a new document. `tokens`, `temperature`, `top_k`, `top_p` and `seed` are as in
    inference/generate.py; the seed is the same at all steps, so that the texts can be compared.
    The texts are in the log (their beginnings), in samples.jsonl, in the report and on trackers.
    The default `tokenizer` is the one of the data.
    """
    if not prompts:
        raise ValueError('prompts: is empty; give at least one, "" for a new document')
    if tokenizer is not None and not hasattr(tokenizer, "encode"):
        raise ValueError("tokenizer: is not trained yet; leave it out to use the one of the data")
    sampling = Sampling(temperature, top_k, top_p)
    return SampleText(prompts, tokens, sampling, seed, every, tokenizer)


@dataclass
class SampleText:
    prompts: tuple[str, ...]
    tokens: int
    sampling: Sampling
    seed: int
    every: Every
    own_tokenizer: Tokenizer | None

    def on_start(self, view: View) -> None:
        self.memory = {"step": -1}  # the last step after which the model wrote
        # The memory that matches the file; any other was restored from a checkpoint.
        self.written = None
        self.prepare(view.model, view.tokenizer)

    def check(self, model: Model, data: Any) -> None:
        self.prepare(model, getattr(data, "tokenizer", None))

    def prepare(self, model: Model, tokenizer: Tokenizer | None) -> None:
        """Refuse a model that cannot write, and prompts that cannot be read."""
        tokenizer = self.own_tokenizer or tokenizer
        if tokenizer is None:
            raise UserError(
                "sample_text: the data has no tokenizer, so no prompt can be read; name the "
                "`tokenizer` of the data, or give sample_text one as its `tokenizer`"
            )
        self.tokenizer = tokenizer
        self.sampling = self.sampling._replace(vocab_size=tokenizer.vocab_size)
        self.starts = [self.start(*pair) for pair in enumerate(self.prompts)]
        try:
            check(self.starts, context_of(model), self.sampling)
        except ValueError as error:
            raise UserError(f"sample_text: {error}") from error

    def start(self, i: int, prompt: str) -> np.ndarray | list[int]:
        """The tokens of one prompt."""
        try:
            return first_tokens(self.tokenizer, prompt)
        except UserError as error:
            raise UserError(
                f"sample_text: {str(error).replace('prompt', f'prompt {i}', 1)}"
            ) from error

    def on_steps(self, view: View) -> None:
        """Let the model write, and show it."""
        step, before = view.step, self.memory["step"]
        if step == before:
            return  # the last step of an epoch
        stop = self.tokenizer.end_of_text
        options = {"seed": self.seed, "stop": stop}
        made = view.generate(self.starts, self.tokens, self.sampling, **options)
        texts = [self.tokenizer.decode(tokens) for tokens in made]
        pairs = list(zip(self.prompts, texts, strict=True))
        if self.memory is not self.written or step < before:
            cut_back(view, FILE, step - 1)  # a resumed run writes these lines again
        self.memory = self.written = {"step": step}
        where = {"step": step, "epoch": view.epoch}
        lines = [json.dumps(where | {"prompt": prompt, "text": text}) for prompt, text in pairs]
        append_lines(view, FILE, lines)
        view.publish.text(step, "samples", "\n\n-----\n\n".join(p + text for p, text in pairs))
        for prompt, text in pairs[:SHOWN]:
            logger.info("Step %d [sample] %s", step, beginning(prompt + text))
        if len(pairs) > SHOWN:
            logger.info("Step %d [sample] and %d more in %s", step, len(pairs) - SHOWN, FILE)


def beginning(text: str) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ..."
