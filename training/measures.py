"""What a run measures, put together from its metrics, its callbacks and what is to be logged; and what of it can be monitored."""

import difflib

from training.tally import NEEDS, Tracked, Watch, covers, phase_of
from utils import UserError

RING = 1024  # steps that are kept one by one, where lines come by the clock


def measures(metrics, callbacks, log):
    """({label: function of one example}, the Watch) of a list or a dict of metrics, each a function or Tracked."""
    rules = labelled(metrics)
    for callback in callbacks:
        for label, rule in getattr(callback, "metrics", {}).items():
            who = f"callbacks: {type(callback).__name__} measures {label!r}"
            if label in rules or label == "loss" or "/" in label:
                raise UserError(
                    f"{who}, a name that another metric has, or with a '/'; is the callback in the list twice?"
                )
            if rule.freq == "STEP":
                raise UserError(
                    f"{who} within epochs, which is for logged metrics alone; say freq EPOCH"
                )
            rules[label] = rule
    needs = {need for callback in callbacks for need in getattr(callback, "needs", ())}
    needs |= {need for need in NEEDS if getattr(log, need, False)} | (
        {"per_step"} if log.log_all else set()
    )
    ring = min(log.every_steps or RING, RING) if "per_step" in needs else 0
    return {label: rule.function for label, rule in rules.items()}, Watch(
        rules, frozenset(hidden(callbacks)), frozenset(needs), ring
    )


def hidden(callbacks):
    """The labels that are for callbacks alone."""
    return {label for callback in callbacks for label in getattr(callback, "metrics", {})}


def labelled(metrics):
    """{label: Tracked} of a list of metrics, whose labels are their names, or of a dict."""
    for metric in metrics.values() if isinstance(metrics, dict) else metrics:
        if not callable(metric.function if isinstance(metric, Tracked) else metric):
            raise UserError(
                f"metrics: {metric!r} is no function; give the function itself, as training.metrics.accuracy"
            )
    pairs = (
        metrics.items()
        if isinstance(metrics, dict)
        else [(part_name(metric), metric) for metric in metrics]
    )
    rules = {}
    for label, metric in pairs:
        if label == "loss" or label in rules or "/" in label:
            raise UserError(
                f"metrics: the name {label!r} is taken, or has a '/'; give {{name: function}} with other names"
            )
        rules[label] = metric if isinstance(metric, Tracked) else Tracked(metric)
    return rules


def part_name(metric):
    """The name of a function, also under functools.partial or with a mode."""
    function = metric.function if isinstance(metric, Tracked) else metric
    return getattr(function, "func", function).__name__


def check_phases(watch, sets):
    """Refuse a metric that no set of this run has the phase for."""
    phases = {phase_of(name) for name in sets}
    for label, rule in watch.rules.items():
        if label not in watch.hidden and not any(covers(rule.phase, phase) for phase in phases):
            raise UserError(
                f"metrics: {label} is for the phase {rule.phase}, and no set is; there are {', '.join(sets)}"
            )


def check_sets(callbacks, sets):
    """Refuse a callback's `sets` that are not there."""
    for i, callback in enumerate(callbacks):
        for name in getattr(callback, "sets", None) or ():
            if name not in sets or name == "train":
                held_out = ", ".join(each for each in sets if each != "train") or "none"
                raise UserError(
                    f"callbacks.{i}.args.sets: no held-out set {name!r}; there are: {held_out}"
                )


def measured_names(sets, reported, watch, rates=()):
    """All names under which something is measured at the end of an epoch; `reported` are {label: [what it is called]}."""
    found = []
    for name in sets:
        labels = watch.modes(reported, phase_of(name), "EPOCH")
        found += [f"{name}_{called}" for label in labels for called in reported[label]]
    norms = [norm for norm in ("gradient_norm", "parameter_norm") if norm in watch.needs]
    return [*found, *norms, *(rates if "learning_rate" in watch.needs else ())]


def check_monitors(monitors, measured):
    """Refuse {place: metric} whose metric will never be measured, before an hour is lost."""
    for place, monitor in monitors.items():
        if monitor is not None and monitor not in measured:
            near = difflib.get_close_matches(monitor, measured, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{place}: {monitor!r} is not measured{hint} ({', '.join(measured)})")
