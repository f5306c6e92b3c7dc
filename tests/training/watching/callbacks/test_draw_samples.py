"""draw_samples: what a model makes while it is trained; and that training does not notice."""

from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from model.diffusion import sample
from model.mlp import mlp
from model.unet import unet
from tests.training.watching.callbacks.fake import view
from train import main
from training.fit import fit
from training.loss import mse
from training.objectives.diffusion import denoising_diffusion
from training.optimizers import adam
from training.report.page import write_report
from training.watching.callbacks.draw_samples import draw_samples
from training.watching.callbacks.sample_pictures import sample_pictures
from training.watching.pictures import as_picture, grid, png
from utils import UserError

ROOT = Path(__file__).parents[4]
MODEL = unet((4, 4, 1), 2, widths=(4,), groups=2, heads=1)
RNG = np.random.default_rng(0)
DATA = RNG.uniform(-1, 1, (40, 4, 4, 1)).astype(np.float32), np.arange(40) % 2
OPTIONS = {"labels": (0, 1), "each": 2, "steps": 3, "guidance": 2.0}


class Kill:
    """Stops the run at a step, as Ctrl-C does."""

    def __init__(self, step):
        self.every, self.step = {"steps": 1}, step

    def on_steps(self, view):
        if view.step == self.step:
            raise KeyboardInterrupt


def run(folder, callbacks=(), **settings):
    settings = {"epochs": 2, "batch_size": 10, "ema": 0.9} | settings
    settings |= {"loss": mse, "objective": denoising_diffusion, "optimizer": adam(lr=0.03)}
    return fit(MODEL, DATA, folder=folder, callbacks=list(callbacks), **settings)


def expected(params):
    """The sheet of the images of these weights, by hand."""
    labels = [0, 1, 0, 1]
    images = sample(MODEL, params, jax.random.key(0), labels, steps=3, guidance=2.0)
    pictures = [as_picture((np.asarray(image) + 1) / 2) for image in images]
    return png(grid(pictures, columns=2, captions=labels))


@pytest.mark.torture
def test_the_picture_is_of_the_averaged_weights_and_training_does_not_notice(tmp_path):
    done = run(tmp_path / "with", [draw_samples(**OPTIONS)])
    picture = (tmp_path / "with" / "pictures" / "samples.png").read_bytes()
    assert picture == expected(done.params)
    assert "samples" in write_report([tmp_path / "with"]).read_text()
    plain = run(tmp_path / "without")
    jax.tree.map(np.testing.assert_array_equal, plain.params, done.params)
    assert plain.history[-1]["train_loss"] == done.history[-1]["train_loss"]
    # The same after a resumed run.
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", [draw_samples(**OPTIONS), Kill(6)], checkpoint={"every_steps": 3})
    run(tmp_path / "killed", [draw_samples(**OPTIONS), Kill(0)], resume=True)
    assert (tmp_path / "killed" / "pictures" / "samples.png").read_bytes() == picture


def test_labels_outside_the_classes_of_the_data_are_refused_before_training(capsys, monkeypatch):
    with pytest.raises(UserError, match="no class 2; the data has 2, 0 to 1"):
        draw_samples((0, 2)).check(MODEL, SimpleNamespace(num_classes=2))
    draw_samples((-1, 0, 1)).check(MODEL, SimpleNamespace(num_classes=2))
    table = {"label": {"weight": np.zeros((3, 4))}}  # of a run of `fit`
    with pytest.raises(UserError, match="no class 2; the data has 2, 0 to 1"):
        draw_samples((0, 2)).on_start(view(model=MODEL, params=table))
    draw_samples((0, 2)).check(MODEL, DATA)  # it is unknown how many classes there are
    config, labels = "configs/diffusion_digits.json", "callbacks.0.args.labels=[0,10]"
    monkeypatch.chdir(ROOT)
    assert main(["-c", config, "--check", labels]) == 2
    assert "draw_samples: labels: there is no class 10" in capsys.readouterr().err


def test_what_makes_no_images_is_refused():
    with pytest.raises(UserError, match="draw_samples: the model makes no images"):
        draw_samples().check(mlp((4,), 2), None)
    with pytest.raises(ValueError, match="labels: is empty"):
        draw_samples(())
    with pytest.raises(ValueError, match="labels: must be classes from 0, or -1 for any, got -2"):
        draw_samples((3, -2))
    with pytest.raises(ValueError, match="bounds: must be the smallest"):
        draw_samples(bounds=(1.0, -1.0))


def test_outputs_that_are_no_images_are_refused():
    callback = sample_pictures(count=2)
    callback.shape = (3,)  # as `check` finds it
    with pytest.raises(UserError, match=r"sample_pictures: the model makes \[4, 4, 7\], not"):
        callback.on_steps(view(apply=lambda noise: np.zeros((len(noise), 4, 4, 7))))
