"""One model in both precisions, ours beside Flax NNX and PyTorch: each in a process of its own.

The processes are started together, as many at once as there are cores, since starting and compiling
take most of the time and need the CPU; then they take turns, one after the other.
"""

import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import SimpleNamespace

from benchmarks.serving import Client, PeerError
from benchmarks.workloads import GPU_WORKLOADS

ROUNDS = 3
# Seconds without a response, of which PyTorch's compiler may take most.
TIMEOUTS = {"large": 60, "tiny": 300}
PRECISIONS = ("bfloat16", "float32")


def speed(model, size, emit):
    """Rows for each framework, form and precision of a model; the last one of each counts."""
    forms = [
        (precision, peer, variant)
        for precision in PRECISIONS
        for peer, variant in peers_of(model, size)
    ]
    with ThreadPoolExecutor(min(len(forms), os.cpu_count())) as pool:
        begun = pool.map(lambda form: started(model, size, *form), forms)
        clients = dict(zip(forms, begun, strict=True))
    costs = {precision: cost_of_unit(model, size, precision) for precision in PRECISIONS}
    rates = {form: [] for form in forms}
    for _ in range(1 if size == "tiny" else ROUNDS):
        for form, client in clients.items():
            take_turn(clients, rates, form, client)
            # After every turn: if this part has to be ended, what was measured counts.
            emit(**row_of(model, form, clients[form], rates[form], costs[form[0]]))


def row_of(model, form, client, rates, cost):
    """The measurements of a form so far; a later row of the same form replaces it."""
    precision, peer, variant = form
    row = {"model": model, "precision": precision, "peer": f"{peer} {variant}".strip()}
    if rates:
        rate = statistics.median(rates)
        useful = cost["flops"] * rate
        mfu = cost["peak"] and useful / cost["peak"]
        row |= {"rate": rate, "unit": cost["unit"], "turns": len(rates)}
        row |= {"tflops": useful / 1e12, "mfu": mfu}
    if isinstance(client, str):
        return row | {"problem": client}
    return row | {"first_epoch": client.first_epoch, "memory": memory_of(client)}


def peers_of(model, size):
    """[(peer, variant)] of what is installed; the fastest layout of PyTorch where there are
    convolutions."""
    layout = " channels_last" if model in ("resnet", "convnext") else ""
    found = [("ours", "")]
    if find_spec("flax") and find_spec("optax"):
        found.append(("flax", ""))
    if find_spec("torch"):
        found.append(("torch", layout.strip() or "eager"))
        # Its compiler needs a compiler of C++ and a minute.
        found += [("torch", f"compile{layout}")] if size == "large" else []
    return found


def started(model, size, precision, peer, variant):
    """A Client after its first epoch, or why there is none."""
    workload = GPU_WORKLOADS[f"{size} {model} {precision}"]
    try:
        return Client(workload, peer, variant, None, False, TIMEOUTS[size])
    except PeerError as error:
        return str(error)


def take_turn(clients, rates, form, client):
    if isinstance(client, str):
        return
    try:
        rates[form].append(client.take_turn())
    except PeerError as error:
        clients[form] = str(error)


def memory_of(client):
    """The peak memory of the device; None on a CPU."""
    try:
        return client.request("device_memory")
    except PeerError:
        return None


def cost_of_unit(model, size, precision):
    """{"flops": the useful operations of an image or a token, "unit", "peak": the FLOP/s of the
    first device, None if unknown}."""
    import jax

    from training.devices.utilisation import peak_of

    workload = GPU_WORKLOADS[f"{size} {model} {precision}"]
    peak = peak_of([SimpleNamespace(device_kind=jax.devices()[0].device_kind)], precision)
    flops = flops_of_example(workload) / workload.units
    return {"flops": flops, "unit": workload.unit, "peak": peak}


def flops_of_example(workload):
    """The useful operations of training on one example: three times those of our forward pass."""
    import importlib

    import jax

    from training.devices.utilisation import flops_of
    from training.fit import recipe_of
    from training.optimizers import adamw

    factory = getattr(importlib.import_module(f"model.{workload.model}"), workload.model)
    model = factory(workload.shape, workload.classes, **workload.args)
    dtype = "int32" if workload.is_text else "float32"
    target = workload.shape if workload.is_text else ()
    batch = (
        jax.ShapeDtypeStruct((1, *workload.shape), dtype),
        jax.ShapeDtypeStruct((1, *target), "int32"),
    )
    trees = jax.eval_shape(model.init, jax.random.key(0))
    return 3 * flops_of(recipe_of(model, optimizer=adamw()).objective, *trees, batch)
