"""How our training speed compares with PyTorch's and Flax's over a distribution of networks, not
only for a few well-known ones: small convolutional networks drawn from a grammar, or recurrent
networks of all widths, lengths, cells and directions.

python -m benchmarks.nets [--kind convolutions|recurrent] [--seed 0] [--count 12] [--rounds 5]
needs training/requirements.txt and benchmarks/requirements.txt
"""

import itertools
import random
import statistics

from benchmarks.harness import WorkerError, print_progress
from benchmarks.results import arguments, markdown, record, short, spread, versions
from benchmarks.training import NAMES, OURS, Runner
from benchmarks.workloads import Conv, Workload

PEERS = {"flax": [""], "torch": ["channels_last"]}
BATCHES = 4  # batches per epoch


def drawn_convolutions(rng):
    """A network of 3 to 8 convolutions over images of 32 or 64 pixels: some of them with a stride,
    in groups or per channel, and perhaps transposed ones at its end."""
    size, width = rng.choice([(32, 3), (64, 3), (32, 1)])
    norm, width_in = rng.choice(["batch", "batch", "group", "layer", "none"]), width
    width = rng.choice([16, 32, 48])
    layers, pixels = [], size
    for i in range(rng.randint(3, 8)):
        stride = rng.choice([1, 1, 2]) if pixels > 8 else 1
        groups = rng.choice([1, 1, 1, 4, width]) if i > 0 else 1
        if stride == 2 and groups == 1:
            width = min(2 * width, 128)
        kernel = rng.choice([1, 3, 3, 5] if groups == 1 and i > 0 else [3, 3, 5])
        layers.append(Conv("conv", width, kernel, stride, groups, norm))
        pixels //= stride
    for _ in range(rng.choice([0, 0, 1, 2])):
        if pixels < size:
            width = max(width // 2, 16)
            layers.append(Conv("up", width, 2, 2, 1, norm))
            pixels *= 2
    batch = rng.choice([16, 32, 64])
    return network("net", {"layers": tuple(layers)}, (size, size, width_in), batch)


def recurrent_networks():
    """Each width with each length, so that cells, directions, depths and lengths take turns."""
    cells = itertools.cycle(["lstm", "gru", "gru", "lstm"])
    for i, (dim, steps) in enumerate(itertools.product([64, 128, 256, 512], [16, 96, 512])):
        if dim * steps <= 2**16:
            args = {"cell": next(cells), "dim": dim, "depth": 1 + i % 2}
            args |= {"bidirectional": i % 3 == 1, "lengths": i % 4 >= 2}
            yield network("rnn", args, (steps, 32), 64 if steps < 512 else 32)


def network(model, args, shape, batch_size):
    return Workload(
        model, args, shape, batch_size, 0.001, examples=BATCHES * batch_size, random=True
    )


def main():
    args = arguments(
        "nets", __doc__, kind=("convolutions", "recurrent"), seed=0, count=12, rounds=5
    )
    kind = args.kind or "convolutions"
    if kind == "recurrent":
        workloads = list(recurrent_networks())
    else:
        rng = random.Random(args.seed)
        workloads = [drawn_convolutions(rng) for _ in range(args.count)]
    names = [NAMES[peer][variant] for peer, variants in PEERS.items() for variant in variants]
    measured = [compared(i, workload, args.rounds) for i, workload in enumerate(workloads)]
    rows = [
        [described(workload), short(statistics.median(rates)), *(cell(peers, n) for n in names)]
        for workload, (rates, peers) in zip(workloads, measured, strict=True)
    ]
    head = [kind, "ours, examples/s", *(f"ours / {name}" for name in names)]
    record(
        args,
        f"Training: {kind} {'drawn from a grammar' if kind == 'convolutions' else ''}".rstrip(),
        markdown(head, rows),
        *(summary(name, measured) for name in names),
        f"Each cell is the median (smallest - largest) of {args.rounds} pairs of turns, with huge "
        f"pages on both sides. {versions('flax', 'torch')}.",
    )


def compared(number, workload, rounds):
    """(our rates, {peer's name: ours as multiples of its rates})."""
    print_progress(f"{number}: {described(workload)}")
    ours = Runner("ours", "", workload, huge_pages=True)
    peers = {}
    for peer, variants in PEERS.items():
        for variant in variants:
            name = NAMES[peer][variant]
            try:
                peers[name] = Runner(peer, variant, workload, huge_pages=True)
            except WorkerError as error:
                print_progress(f"{name}: {error}")
    for _ in range(rounds):
        for peer in peers.values():
            rate = ours.take_turn()
            peer.multiples.append(rate / peer.take_turn())
    for runner in [ours, *peers.values()]:
        runner.worker.close()
    return ours.rates, {name: peer.multiples for name, peer in peers.items()}


def described(workload):
    shape = " x ".join(map(str, workload.shape))
    if workload.model == "rnn":
        args = workload.args
        words = [f"{args['depth']} {args['cell']} of {args['dim']}"]
        words += [word for word in ("bidirectional", "lengths") if args[word]]
        return f"{', '.join(words)}; {shape}, batch {workload.batch_size}"
    layers = " ".join(layer_name(layer) for layer in workload.args["layers"])
    norm = workload.args["layers"][0].norm
    return f"{layers}, norm {norm}; {shape}, batch {workload.batch_size}"


def layer_name(layer):
    kind = "up" if layer.kind == "up" else f"{layer.kernel}x{layer.kernel}"
    stride = f"/{layer.stride}" if layer.stride > 1 and layer.kind == "conv" else ""
    return f"{kind}{stride}:{layer.width}" + (f"g{layer.groups}" if layer.groups > 1 else "")


def cell(peers, name):
    return spread(peers[name]) if name in peers else "none"


def summary(name, measured):
    medians = [statistics.median(peers[name]) for _, peers in measured if name in peers]
    return f"{OURS} / {name} over {len(medians)} networks: {spread(medians)}."


if __name__ == "__main__":
    main()
