"""Checks of the callbacks that `fit` or a config is given, before the run has a folder."""

import inspect
import re
from contextlib import suppress

from training.base import Tracked
from training.metrics import NEEDS
from training.runs.argument_checks import required
from training.watching.hooks import AFTER_EVALUATION, HOOKS, callback_name
from utils import UserError


def check_hooks(callbacks):
    """Refuse a hook that would never be called, and a need that is never measured."""
    if not isinstance(callbacks, list | tuple):
        raise UserError(f"callbacks: must be a list, got {callbacks!r}")
    for callback in callbacks:
        if isinstance(callback, type):
            call = f"{callback.__name__}({', '.join(required(callback))})"
            raise UserError(f"callbacks: {callback.__name__} is a class; pass an object: {call}")
        name, every = callback_name(callback), getattr(callback, "every_n_epochs", 1)
        for hook in dir(callback):
            if hook.startswith("on_") and hook not in HOOKS:
                raise UserError(
                    f"callbacks: {name} has {hook!r}, which is not a hook ({', '.join(HOOKS)})"
                )
            if hook in HOOKS and not takes_one(getattr(callback, hook)):
                form = f"def {hook}(self, view)"
                raise UserError(f"callbacks: {name}.{hook} must take the view of the run: {form}")
        check_reports(name, callback)
        for need in getattr(callback, "needs", ()):
            if need not in NEEDS:
                raise UserError(
                    f"callbacks: {name} needs {need!r}, which is not measured ({', '.join(NEEDS)})"
                )
        for label, rule in getattr(callback, "metrics", {}).items():
            if not isinstance(rule, Tracked):
                where = f"callbacks: {name}.metrics[{label!r}]"
                raise UserError(f"{where} must be tracked(function, ...) of training.base")
        if not isinstance(every, int) or every < 1:
            raise UserError(
                f"callbacks: {name}.every_n_epochs must be a whole number from 1, got {every!r}"
            )
        has_any = any(hasattr(callback, name) for name in (*HOOKS, "needs", "metrics"))
        if isinstance(callback, str) or not has_any:
            raise UserError(
                f"callbacks: {callback!r} has no hook; "
                "a callback is an object, as early_stopping(patience=3) returns one"
            )


def check_reports(name, callback):
    """Refuse names of values that a callback cannot return."""
    if not hasattr(callback, "reports") or callable(callback.reports):
        return
    names, form = callback.reports, '("val_auc",)'
    is_names = isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
    if not is_names or not all(re.match("[a-z0-9-]+_", n) for n in names):
        raise UserError(f"callbacks: {name}.reports must be names as {form}, got {names!r}")
    if names and not any(hasattr(callback, hook) for hook in AFTER_EVALUATION):
        hooks = " or ".join(AFTER_EVALUATION)
        raise UserError(f"callbacks: {name} reports {names[0]!r}, and has no {hooks} to return it")


def takes_one(function):
    """Whether a function can be called with one argument, as far as Python knows."""
    with suppress(ValueError):  # it has no signature
        try:
            inspect.signature(function).bind(None)
        except TypeError:
            return False
    return True


def check_callbacks(recipe, data):
    """Let callbacks refuse a model, or a Data or dataset, before the run has a folder."""
    for callback in recipe.callbacks:
        if hasattr(callback, "check"):
            callback.check(recipe.model, data)
