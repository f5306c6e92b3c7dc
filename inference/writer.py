"""Generate text with the files of an exported language model, by NumPy and a runtime, without
JAX."""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

from data_loader.tokenizers.saved import first_tokens, streamed, tokenizer_file
from inference.decoding import LOGITS, POSITION, TOKEN, Decoder, stream
from inference.folders import REPORT
from inference.generate import check_tokenizer
from inference.runtimes import PACKAGES, open_model
from model.sampling import check
from utils import RunError, UserError, first_line
from utils.files import parse_json, read_file

TOKENIZER = "tokenizer.json"


class Writer(NamedTuple):
    """An exported language model and its tokenizer."""

    decoder: Decoder
    tokenizer: Any
    source: Path  # the file

    def pieces(self, prompt, tokens, sampling, seed=0):
        """The prompt, then the text that follows it, piece by piece, up to the end of the
        document."""
        start, stop = first_tokens(self.tokenizer, prompt), self.tokenizer.end_of_text
        sampling = sampling._replace(vocab_size=self.tokenizer.vocab_size)
        try:
            check([start], self.decoder.context, sampling)  # before anything is shown
        except ValueError as error:
            raise UserError(str(error).replace("prompt 0", "prompt")) from error
        yield prompt
        try:
            written = stream(self.decoder, start, tokens, sampling, seed=seed, stop=stop)
            yield from streamed(self.tokenizer, written)
        except Exception as error:  # the runtimes raise many kinds
            raise RunError(f"{self.source}: fails: {first_line(error)}") from error


def open_writer(path, tokenizer=None):
    """The writer of the folder of an export, or of one of its files."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    step = step_of(path, folder)
    file = folder / Path(step["file"]).name
    model = open_model(file, step.get("signature"))
    if missing := {TOKEN, POSITION} - {*model.inputs} or {LOGITS} - {*model.outputs}:
        raise UserError(f"{file}: is not a decode step: it has no {min(missing)}; export again")
    decoder = Decoder(model, model.inputs, step["context"])
    return Writer(decoder, tokenizer_of(folder, tokenizer, model), file)


def step_of(path, folder):
    """The entry of the decode step in the report of an export."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; name an export, or one of its files")
    if path.is_file() and path.suffix.lower() not in PACKAGES:
        raise UserError(
            f"{path}: is not an exported file; for a checkpoint, run "
            f"`python -m inference.generate {path} --prompt ...`"
        )
    report = folder / REPORT
    if not report.is_file():
        raise UserError(
            f"{folder}: is not an export: it has no {REPORT}; name the folder that "
            f"convert_tflite.py has written (for a run, `python -m inference.generate {folder} "
            "--prompt ...`)"
        )
    try:
        formats = parse_json(read_file(report))["formats"]
        steps = {f".{name}": each["decode"] for name, each in formats.items() if "decode" in each}
        suffixes = [path.suffix.lower()] if path.is_file() else list(steps)
        known = {suffix: steps[suffix] for suffix in suffixes if suffix in steps}
        known = {key: (step, step["file"], int(step["context"])) for key, step in known.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{report}: is not a report of an export ({error}); export again"
        ) from error
    if not known:
        raise UserError(f"{path}: has no decode step; name the export of a language model")
    runs = [step for key, (step, *_) in known.items() if importlib.util.find_spec(PACKAGES[key])]
    return runs[0] if runs else next(iter(known.values()))[0]


def tokenizer_of(folder, file, model):
    """The tokenizer of an export, or that of a file, which must be the same one."""
    stored = folder / TOKENIZER
    recorded = tokenizer_file(stored) if stored.is_file() else None
    tokenizer = tokenizer_file(file) if file else recorded
    if tokenizer is None:
        raise UserError(
            f"{folder}: has no {TOKENIZER}; pass the tokenizer that the model was trained with, as "
            "--tokenizer tokenizer.json"
        )
    shape, _ = model.outputs[LOGITS]
    check_tokenizer(tokenizer, recorded, shape[-1], file or stored)
    return tokenizer
