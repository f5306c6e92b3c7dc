"""When a run measures its held-out sets: in its epochs, before the first one, and after the last with its best checkpoint."""

import logging

from training.checkpoint.restore import filled

logger = logging.getLogger("main")


def in_epochs(sets, options):
    """Those of the sets that are measured while a run trains."""
    held_out = [
        name for name in sets if name != "train" and (name != "test" or options.test_at == "epochs")
    ]
    return held_out if options.eval_every or options.eval_initial else []


def at_the_end(sets, options):
    """Those of the sets that are measured when a run has trained."""
    return [name for name in sets if name == "test" and options.test_at == "end"]


def measure(loop, names, weights=None, always=False):
    """{metric: value} of these sets, validation before test; None where a signal came in between. `always` tells all callbacks,
    whatever the epoch."""
    run, found = loop.run, {}
    groups = {
        "validation": [name for name in names if name != "test"],
        "test": [name for name in names if name == "test"],
    }
    for kind, members in groups.items():
        if members:
            loop.notify(f"on_{kind}_start", always=always)
        for name in members:
            tallies = loop.runner.evaluate(name, loop.flight.chunk, loop.look_for_signals, weights)
            if tallies is None:
                return None
            named = loop.reader.values(name, tallies)
            loop.log.measured(run.epoch, name, named)
            found |= named
            run.arrays |= loop.reader.arrays(name, tallies)
            run.metrics = run.metrics | named
            run.evaluated.append(name)
        if members:
            loop.notify(f"on_{kind}_end", always=always)
    return found


def of_epoch(loop):
    """The metrics of the sets that are measured in epochs, where that is due; None where a signal came."""
    options = loop.options
    due = options.eval_every and loop.run.epoch % options.eval_every == 0
    return measure(loop, in_epochs(loop.runner.feeds, options)) if due else {}


def before_the_first(loop):
    """What the initial weights do, so that curves begin where the run does."""
    if loop.options.eval_initial:
        found = measure(loop, in_epochs(loop.runner.feeds, loop.options))
        if found:
            loop.log.row({"epoch": 0, "step": 0, "initial": True}, found)
        loop.run.metrics, loop.run.evaluated = {}, []


def after_the_last(loop):
    """The test set, once, with the best checkpoint, or with the last weights where no best one is known."""
    run, names = loop.run, at_the_end(loop.runner.feeds, loop.options)
    if not names or not run.completed:
        return
    run.untested = True  # until it is
    if run.signal:
        return
    best = loop.keeper.best()
    label = best.name if best else "the last weights"
    logger.info("Testing %s", label)
    trees = weights_of(loop.runner, best) if best else None
    run.tested = trees and trees[0]
    found = measure(loop, names, loop.runner.lanes.stack(trees) if best else None, always=True)
    run.tested, run.untested = None, found is None
    if found:
        loop.log.row({"epoch": run.epoch, "step": run.step, "final": label}, found)


def weights_of(runner, found):
    """(params, state) of each replica from a checkpoint."""
    now = runner.replica_states()[0]
    which = "params" if now.ema is None else "ema"
    like = {which: now.params, "state": now.state}
    trees = [
        filled(path, arrays, like) for path, arrays in zip(found.paths, found.arrays, strict=True)
    ]
    return [runner.on_devices((tree[which], tree["state"])) for tree in trees]
