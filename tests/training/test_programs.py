"""Programs: one compilation, errors for changed arguments, and no compilation for debugging."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import utils
from model.base import Model
from training.devices.sharding import Plan, make_mesh
from training.engine import Program, compile_step
from training.feed import over_batch
from training.fit import fit
from training.loss import mse
from training.optimizers import sgd
from utils import UserError

PLAN = Plan(make_mesh())
WHOLE = PLAN.whole
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def add(const, carry, batch, valid):
    total = carry["total"] + const * batch[0].sum(0) * valid
    return {"total": total}, total.sum()


def start():
    return {"total": jnp.zeros(3)}


def batch(rows=4, dtype=np.float32, sharding=None):
    return jax.device_put(np.ones((rows, 3), dtype), sharding), np.zeros(rows, np.int32)


def program(**settings):
    """A program over batches, compiled for 4 rows."""
    compiled = Program(over_batch(add), WHOLE, **settings)
    compiled(2.0, start(), batch(), np.int32(4))
    return compiled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (2.0, start(), batch(dtype=np.uint8), np.int32(4)),
            "batch x float32[4,3], and was now given uint8[4,3]; every batch",
        ),
        (
            (2.0, start(), batch(rows=3), np.int32(4)),
            "batch x float32[4,3], and was now given float32[3,3]; every batch",
        ),
        (
            (2.0, start(), (batch()[0], None), np.int32(4)),
            "batch y int32[4], and was now given nothing; every batch must have one",
        ),
        ((2.0, start(), batch(), 4.0), "valid int32[], and was now given float32[]"),
        (
            (2.0, {"total": jnp.zeros(5)}, batch(), np.int32(4)),
            "state total float32[3], and was now given float32[5]",
        ),
        (("two", start(), batch(), np.int32(4)), "weights float32[], and was now given a str"),
    ],
)
def test_the_error_names_the_argument_that_changed(arguments, message):
    with pytest.raises(UserError) as error:
        program(name="train")(*arguments)
    assert str(error.value).startswith(f"training step: it was compiled for {message}")
    assert isinstance(error.value.__cause__, TypeError)


def test_the_error_names_the_set_and_an_argument_with_another_sharding():
    other = NamedSharding(PLAN.mesh, PartitionSpec(), memory_kind="unpinned_host")
    message = (
        r"^evaluation of val: it was compiled for batch x float32\[4,3\] laid out as .*unpinned"
    )
    with pytest.raises(UserError, match=message):
        program(name="val")(2.0, start(), batch(sharding=other), np.int32(4))


def test_prepare_compiles_without_running_and_reports_time_and_memory():
    prepared, carry = Program(over_batch(add), WHOLE), start()
    assert (prepared.compiled, prepared.seconds, prepared.memory) == (None, 0.0, None)
    prepared.prepare(2.0, carry, batch(), np.int32(4))
    compiled, seconds = prepared.compiled, prepared.seconds
    assert seconds > 0
    assert prepared.memory["argument_size_in_bytes"] >= 4 * 3 * 4 + 3 * 4  # x and the carry
    names = {f"{part}_size_in_bytes" for part in ("temp", "argument", "output")}
    assert prepared.memory.keys() == names
    result, [total] = prepared(2.0, carry, batch(), np.int32(4))  # prepare did not donate the carry
    np.testing.assert_array_equal(result["total"], 2 * 4 * 4 * np.ones(3))
    assert total == 96
    assert carry["total"].is_deleted()
    assert (prepared.compiled, prepared.seconds) == (compiled, seconds)


HEADS_CUT, FEATURES_CUT, WHOLE_HEADS = (
    (None, None, "tensor", None),
    (None, None, None, "tensor"),
    (None, None, None, None),
)


@pytest.mark.parametrize(
    ("queries", "keys"), [(HEADS_CUT, WHOLE_HEADS), (FEATURES_CUT, FEATURES_CUT)]
)
def test_a_mesh_that_cuts_heads_of_the_kernel_of_attention_is_an_error(queries, keys):
    """By the checks of JAX, which it makes on a GPU."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    layout = cudnn.AttentionLayout.BTNH.value
    with pytest.raises(ValueError, match="harding") as refused:
        cudnn._check_qkv_bias_mask_spec(queries, keys, keys, None, layout)

    class Lowered:
        def compile(self, _options):
            raise jax.errors.JaxRuntimeError(f"INTERNAL: custom_partitioner: {refused.value}")

    with pytest.raises(UserError, match=r"^mesh\.tensor: cuts a head .*; let mesh\.tensor divide"):
        compile_step(Lowered(), None)


class Streamed:
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i], Y[i]


@pytest.fixture
def debugging():
    """What `--debug` sets, for all threads."""
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time is compilation
    yield lambda: jax.config.update("jax_disable_jit", True)
    jax.config.update("jax_disable_jit", False)
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.slow
def test_a_debugged_run_computes_the_same_and_its_model_sees_concrete_arrays(tmp_path, debugging):
    seen = set()

    def init(key):
        return {"weight": jnp.zeros(6)}, {}

    def apply(params, state, x, *, train=False, key=None):
        array = getattr(x, "primal", x)  # jax.grad wraps it
        # The first call traces only shapes, so there are no numbers.
        seen.add(None if isinstance(array, jax.core.Tracer) else float(array[0, 0]))
        return x @ params["weight"], state

    model = Model(init, apply)
    settings = {"optimizer": sgd(lr=0.1), "loss": mse, "epochs": 1, "batch_size": 8}
    usual = fit(model, (X, Y), (X, Y), **settings)
    debugging()
    for name, data in (("resident", (X, Y)), ("streamed", Streamed())):
        seen.clear()
        run = fit(model, data, (X, Y), folder=tmp_path / name, **settings)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # noqa: E731
        jax.tree.map(close, run.params, usual.params)
        np.testing.assert_allclose(run.metrics["test_loss"], usual.metrics["test_loss"], rtol=1e-4)
        assert seen - {None} <= set(X[:, 0].tolist())
        # The first example of each of the five shuffled training batches, and of the test batches.
        assert len(seen) > 6
        assert (tmp_path / name / "checkpoint-epoch_1.params").exists()


@pytest.mark.parametrize(
    ("name", "title"), [("train", "training step"), ("val", "evaluation of val")]
)
def test_compiling_is_logged_where_it_is_slow(monkeypatch, caplog, name, title):
    with caplog.at_level("INFO", "main"):
        monkeypatch.setattr(utils, "SLOW", 600.0)
        program(name=name)
        assert not caplog.records
        monkeypatch.setattr(utils, "SLOW", 0.0)
        program(name=name)(2.0, start(), batch(), np.int32(4))
    assert [record.getMessage() for record in caplog.records] == [f"Compiling the {title} ..."]
