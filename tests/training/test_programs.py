"""Programs: one compilation, what is said where the arguments change, and none at all to debug."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model.base import Model
from training.devices.mesh import make_mesh, replicated, sharded
from training.fit import fit
from training.loss import mse
from training.optimizers import sgd
from training.programs import Program, Start, loops_are_slow, over_batch, over_rows, placed
from utils import UserError

MESH = make_mesh()
WHOLE = replicated(MESH)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


def add(const, carry, batch, valid):
    return {"total": carry["total"] + const * batch[0].sum(0) * valid}


def report(carry):
    return carry["total"].sum()


def start():
    return {"total": jnp.zeros(3)}


def batch(rows=4, dtype=np.float32, where=None):
    return jax.device_put(np.ones((rows, 3), dtype), where), np.zeros(rows, np.int32)


def program(**settings):
    """A program over batches, compiled for those of 4 rows."""
    made = Program(over_batch(add, report), WHOLE, **settings)
    made(2.0, start(), batch(), np.int32(4))
    return made


@pytest.mark.parametrize(
    ("arguments", "told"),
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
def test_names_the_argument_that_changed(arguments, told):
    with pytest.raises(UserError) as error:
        program(name="train")(*arguments)
    assert str(error.value).startswith(f"training step: it was compiled for {told}")
    assert isinstance(error.value.__cause__, TypeError)


def test_names_the_set_and_an_argument_that_lies_elsewhere():
    elsewhere = NamedSharding(MESH, PartitionSpec(), memory_kind="unpinned_host")
    with pytest.raises(
        UserError,
        match=r"^evaluation of val: it was compiled for batch x float32\[4,3\] "
        r"laid out as .*unpinned",
    ):
        program(name="val")(2.0, start(), batch(where=elsewhere), np.int32(4))


def test_arguments_that_differ_in_no_leaf_give_the_error_of_jax():
    with pytest.raises(TypeError, match="list"):
        program()(2.0, start(), [*batch()], np.int32(4))


def test_errors_of_the_function_itself_are_left_alone():
    def broken(const, carry, batch, valid):
        raise TypeError("of its own")

    for debugging in (False, True):
        with jax.disable_jit(debugging), pytest.raises(TypeError, match="of its own"):
            Program(over_batch(broken, report), WHOLE)(2.0, start(), batch(), np.int32(4))


def test_names_survive_vmap_and_may_be_given():
    stacked = jax.vmap(over_batch(add, report), in_axes=(None, 0, 0, None))
    with pytest.raises(
        UserError,
        match=r"step: it was compiled for batch x float32\[2,4,3\], "
        r"and was now given float32\[2,3,3\]",
    ):
        two = Program(stacked, WHOLE)
        for rows in (4, 3):
            two(
                2.0,
                jax.tree.map(lambda a: jnp.stack([a, a]), start()),
                jax.tree.map(lambda a: np.stack([a, a]), batch(rows)),
                4,
            )
    assert (
        Program(over_rows(add, report, sharded(MESH), looped=False), WHOLE).arguments[-1] == "count"
    )
    with pytest.raises(
        UserError, match=r"compiled for genuine int32\[\], and was now given float32\[\]"
    ):
        program(arguments=("weights", "sums", "batch", "genuine"))(2.0, start(), batch(), 4.0)


def test_prepare_compiles_without_running_and_measures():
    prepared, carry = Program(over_batch(add, report), WHOLE), start()
    assert (prepared.compiled, prepared.seconds, prepared.memory) == (None, 0.0, None)
    prepared.prepare(2.0, carry, batch(), np.int32(4))
    compiled, seconds = prepared.compiled, prepared.seconds
    assert seconds > 0
    assert prepared.memory["argument_size_in_bytes"] >= 4 * 3 * 4 + 3 * 4  # x and the carry
    assert prepared.memory.keys() == {
        "temp_size_in_bytes",
        "argument_size_in_bytes",
        "output_size_in_bytes",
    }
    found, total = prepared(2.0, carry, batch(), np.int32(4))  # the carry was not donated before
    np.testing.assert_array_equal(found["total"], 2 * 4 * 4 * np.ones(3))
    assert total == 96
    assert carry["total"].is_deleted()
    assert (prepared.compiled, prepared.seconds) == (compiled, seconds)


def test_to_debug_every_call_runs_the_function_itself_on_numbers():
    seen = []

    def step(const, carry, batch, valid):
        seen.append(float(batch[0].sum()))  # raises for a tracer
        return add(const, carry, batch, valid)

    data = np.arange(8.0, dtype=np.float32).reshape(4, 2)[:, :1] * np.ones(3, np.float32)
    order, valid = np.array([[0, 1], [2, 3]]), np.array([2, 2])
    with jax.disable_jit():
        assert loops_are_slow(None, None, None, None)
        assert Start(lambda: seen.clear() or 3, WHOLE)() == 3
        run, carry = Program(over_rows(step, report, sharded(MESH), looped=False), WHOLE), start()
        run.prepare(2.0, carry, (data, data), order, valid, np.int32(0), np.int32(1))
        assert (seen, run.seconds) == ([], 0.0)
        for row in range(2):
            carry, total = run(2.0, carry, (data, data), order, valid, np.int32(row), np.int32(1))
    assert seen == [6.0, 30.0]  # 0 and 2, 4 and 6, three times each
    assert total == 2 * 2 * 36


class Streamed:
    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i], Y[i]


@pytest.fixture
def debugging():
    """As `--debug` has it, for all threads."""
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time is compilation
    yield lambda: jax.config.update("jax_disable_jit", True)
    jax.config.update("jax_disable_jit", False)
    jax.config.update("jax_disable_most_optimizations", False)


def test_a_run_to_debug_is_the_same_run_and_a_model_sees_numbers(tmp_path, debugging):
    seen = set()

    def init(key):
        return {"weight": jnp.zeros(6)}, {}

    def apply(params, state, x, *, train=False, key=None):
        array = getattr(x, "primal", x)  # of what jax.grad wraps
        seen.add(
            None if isinstance(array, jax.core.Tracer) else float(array[0, 0])
        )  # once, for the shapes, there are no numbers
        return x @ params["weight"], state

    model = Model(init, apply)
    settings = {"optimizer": sgd(lr=0.1), "loss": mse, "epochs": 1, "batch_size": 8}
    usual = fit(model, (X, Y), (X, Y), **settings)
    debugging()
    for name, data in (("resident", (X, Y)), ("streamed", Streamed())):
        seen.clear()
        run = fit(model, data, (X, Y), folder=tmp_path / name, **settings)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            run.params,
            usual.params,
        )
        np.testing.assert_allclose(run.metrics["test_loss"], usual.metrics["test_loss"], rtol=1e-4)
        assert seen - {None} <= set(X[:, 0].tolist())
        assert (
            len(seen) > 6
        )  # the first example of five batches, shuffled, and of those of the test set
        assert (tmp_path / name / "checkpoint-epoch_1.params").exists()


def forms(rows=4):
    """Those of what `program` is called with."""
    shape = jax.ShapeDtypeStruct
    batch = shape((rows, 3), np.float32), shape((rows,), np.int32)
    return (
        shape((), np.float32),
        placed({"total": shape((3,), np.float32)}, WHOLE),
        batch,
        shape((), np.int32),
    )


@pytest.mark.parametrize(("rows", "begun"), [(4, True), (5, False)])
def test_what_began_in_a_thread_is_used_if_it_fits_and_compiled_again_if_not(rows, begun):
    pool = ThreadPoolExecutor(1)
    made, carry = Program(over_batch(add, report), WHOLE, pool=pool), jax.device_put(start(), WHOLE)
    made.begin(*forms(rows))
    future, before = made.future, made.seconds
    assert before > 0
    _, total = made(np.float32(2), carry, batch(), np.int32(4))
    assert total == 96 and made.seconds > before
    assert (future.result() is made.compiled) == begun
    pool.shutdown()
