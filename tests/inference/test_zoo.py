"""Random models: each file computes what JAX computes, or the model is refused with its line."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.inference import zoo

ROOT = Path(__file__).resolve().parents[2]
SEEDS, PART = 240, 20


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "becomes"), [(13, "equal"), (22, "refused: ")])
def test_a_small_random_model_is_exported_or_refused(seed, becomes):
    results = zoo.outcomes(zoo.model_of(seed), seed)
    assert [result.startswith(becomes) for result in results.values()] == [True, True], results


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1006))
def test_a_random_model_exports_or_is_refused_with_its_line(seed):
    model = zoo.model_of(seed)
    results = zoo.outcomes(model, seed)
    assert "WRONG" not in str(results), f"{results}\n{model.source}"


@pytest.mark.torture
@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_many_random_models_export_or_are_refused_with_their_lines(first):
    """In a process of their own, whose last line names the seed of a model that ends it."""
    command = [sys.executable, "-m", "tests.inference.zoo", str(first), str(first + PART)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    lines = run.stdout.splitlines()
    assert run.returncode == 0, f"died after: {lines[-1:]}\n{run.stderr[-2000:]}"
    assert [int(line.split()[0]) for line in lines] == [*range(first, first + PART)]
    wrong = "\n".join(line for line in lines if "WRONG" in line)
    assert not wrong, f"{wrong}\nrun one alone with python -m tests.inference.zoo SEED"
    assert run.stdout.count(" equal") > 0.8 * len(zoo.FORMATS) * PART


def test_a_wrong_number_a_wrong_shape_and_a_refusal_without_a_line_are_found(monkeypatch, tmp_path):
    """The zoo can fail: each lowering here is broken on purpose."""
    from inference.lowering.onnx_ops import PRIMITIVES

    x = zoo.np.ones((3, 4), zoo.np.float32)
    source = 'def model(w, inputs):\n    return {"v0": jax.lax.tan(inputs["x"])}'
    model = zoo.compiled(7, source, {}, {"x": x})
    monkeypatch.setattr(zoo, "FORMATS", {"onnx": zoo.write_onnx})
    assert zoo.outcomes(model, 7) == {"onnx": "equal"}
    broken = {
        "WRONG: batch 3: v0: 100% is": lambda t, x, **_: t.Sin(x),
        "WRONG: InferenceError": lambda t, x, **_: t.Gather(x, zoo.np.int64(0), axis=1),
        "refused: tan of tangents (zoo_7.py:2": lambda t, x, **_: t.refuse("tan", "of tangents"),
        "WRONG: UserError: cannot convert zoo_7.py:2": lambda t, x, **_: {}["tan"],
    }
    for message, function in broken.items():
        monkeypatch.setitem(PRIMITIVES, "tan", function)
        assert zoo.outcomes(model, 7)["onnx"].startswith(message)
