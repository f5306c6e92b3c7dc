"""The recurrent layers, against PyTorch's on packed sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.layers.recurrent import gru, gru_init, lstm, lstm_init
from model.rnn import rnn
from tests.model.compare import normal, quick_jit, random_params

pytestmark = pytest.mark.contract

LAYERS = {"lstm": (lstm_init, lstm), "gru": (gru_init, gru)}
LENGTHS = np.array([5, 1, 7, 3])
BATCH, STEPS, WIDTH, DIM, CLASSES = 4, 7, 3, 5, 4


def torch_model(cell, params, depth, both):
    """PyTorch's layers with our params, as {name: tensor}, and a function from these and the input
    to (outputs, states after the last steps of the last layer)."""
    torch = pytest.importorskip("torch")
    module = getattr(torch.nn, cell.upper())
    net = module(WIDTH, DIM, depth, batch_first=True, bidirectional=both).double()
    own = {}
    for i, directed in enumerate(params["layers"]):
        for end, layer in zip(("", "_reverse"), directed, strict=False):
            hidden_bias = np.zeros(layer["hidden"]["weight"].shape[1])
            if cell == "gru":
                hidden_bias[2 * DIM :] = layer["candidate"]["bias"]
            own |= {
                f"weight_ih_l{i}{end}": layer["input"]["weight"].T,
                f"weight_hh_l{i}{end}": layer["hidden"]["weight"].T,
                f"bias_ih_l{i}{end}": layer["input"]["bias"],
                f"bias_hh_l{i}{end}": hidden_bias,
            }
    net.load_state_dict({name: torch.tensor(np.array(a)) for name, a in own.items()})
    return torch, net


def torch_run(torch, net, params, x, lengths):
    """(logits, outputs) of the classifier in PyTorch, whose input gets a gradient."""
    rnn_utils = torch.nn.utils.rnn
    packed = rnn_utils.pack_padded_sequence(
        x, torch.tensor(lengths), batch_first=True, enforce_sorted=False
    )
    out, state = net(packed)
    out, _ = rnn_utils.pad_packed_sequence(out, batch_first=True, total_length=STEPS)
    state = state[0] if isinstance(state, tuple) else state
    last = torch.cat(list(state[-2:] if net.bidirectional else state[-1:]), -1)
    head = {k: torch.tensor(np.array(a)) for k, a in params["head"].items()}
    return last @ head["weight"] + head["bias"], out


@pytest.mark.slow
@pytest.mark.parametrize("cell", LAYERS)
@pytest.mark.parametrize("depth, both", [(1, False), (2, True)])
def test_values_and_gradients_are_those_of_pytorch_on_packed_sequences(cell, depth, both):
    with jax.enable_x64(True):
        options = {"cell": cell, "dim": DIM, "depth": depth, "bidirectional": both}
        model = rnn((STEPS, WIDTH), CLASSES, **options)
        params, _ = random_params(lambda key: model.init(key))
        params = jax.tree.map(lambda a: a.astype(np.float64) / 2, params)
        x, weights = (normal(i, BATCH, STEPS, n).astype(float) for i, n in ((7, WIDTH), (8, 1)))
        weights = weights[:, 0] * np.ones(CLASSES)

        def total(params, x):
            logits, _ = model.apply(params, {}, {"sequence": x, "length": LENGTHS})
            return (logits**2 * weights).sum(), logits

        gradient = jax.value_and_grad(total, (0, 1), has_aux=True)
        (_, logits), (grads, grad_x) = quick_jit(gradient)(params, x)

    torch, net = torch_model(cell, params, depth, both)
    tensor = torch.tensor(x, requires_grad=True)
    theirs, _ = torch_run(torch, net, params, tensor, LENGTHS)
    (theirs**2 * torch.tensor(weights)).sum().backward()
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)  # noqa: E731
    close(logits, theirs.detach())
    close(grad_x, tensor.grad)
    for i, directed in enumerate(grads["layers"]):
        for end, layer in zip(("", "_reverse"), directed, strict=False):
            close(layer["input"]["weight"].T, getattr(net, f"weight_ih_l{i}{end}").grad)
            close(layer["input"]["bias"], getattr(net, f"bias_ih_l{i}{end}").grad)
            close(layer["hidden"]["weight"].T, getattr(net, f"weight_hh_l{i}{end}").grad)
            if cell == "gru":
                own = getattr(net, f"bias_hh_l{i}{end}").grad[2 * DIM :]
                close(layer["candidate"]["bias"], own)


@pytest.mark.slow
@pytest.mark.parametrize("cell", LAYERS)
@pytest.mark.parametrize("reverse", [False, True])
def test_what_follows_the_length_changes_nothing(cell, reverse):
    """Not even NaN, in values or gradients; the outputs there are 0."""
    init, layer = LAYERS[cell]
    params = random_params(init, WIDTH, DIM)
    x = normal(0, BATCH, STEPS, WIDTH)
    padding = np.arange(STEPS)[None, :, None] >= LENGTHS[:, None, None]

    @quick_jit
    def run(params, x, lengths):
        def total(params, x):
            y, last = layer(params, x, lengths, reverse=reverse)
            return (y**2).sum() + last.sum(), (y, last)

        return jax.value_and_grad(total, (0, 1), has_aux=True)(params, x)

    ((_, (y, last)), grads) = first = run(params, x, LENGTHS)
    other = run(params, jnp.where(padding, np.nan, x), LENGTHS)
    jax.tree.map(np.testing.assert_array_equal, first, other)
    assert not y[np.broadcast_to(padding, y.shape)].any() and not (grads[1] * padding).any()
    alone = run(params, x[3:, :3], np.array([3]))[0][1]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), alone, (y[3:, :3], last[3:])
    )
    # Without lengths, all steps count.
    whole, same = (
        quick_jit(layer, static_argnames="reverse")(params, x, lengths, reverse=reverse)
        for lengths in (None, np.full(BATCH, STEPS))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), whole, same)


def test_a_program_does_not_grow_with_the_number_of_steps():
    def operations(steps):
        params = jax.eval_shape(lambda: lstm_init(jax.random.key(0), WIDTH, DIM))
        x = jax.ShapeDtypeStruct((BATCH, steps, WIDTH), float)
        return str(jax.make_jaxpr(lambda p, x: lstm(p, x, LENGTHS))(params, x)).count(" = ")

    assert operations(100) == operations(10)


@pytest.mark.slow
def test_a_new_lstm_remembers():
    params = lstm_init(jax.random.key(0), 3, 4)
    np.testing.assert_array_equal(params["input"]["bias"], np.repeat([0, 1, 0, 0], 4))


@pytest.mark.parametrize("cell", LAYERS)
@pytest.mark.parametrize("reverse", [False, True])
def test_values_with_and_without_gradients_are_equal(cell, reverse):
    """A gradient computes all gates by one tanh."""
    init, layer = LAYERS[cell]
    params, x = random_params(init, WIDTH, DIM), normal(3, BATCH, STEPS, WIDTH)
    apply = lambda params: layer(params, x, LENGTHS, reverse=reverse)  # noqa: E731
    plain, (fast, _) = quick_jit(apply)(params), quick_jit(lambda p: jax.vjp(apply, p))(params)
    for a, b in zip(plain, fast, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
