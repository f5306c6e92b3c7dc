"""A random model under construction: what has been computed so far, and what a rule may use."""

import jax
import numpy as np

LARGEST = 4000  # numbers of an array, for a batch of 3
EXACT = 4  # the level up to which float32 computes without rounding; see `Draw.level`


class Redraw(Exception):
    """A rule does not fit the values that there are."""


class Draw:
    """A model under construction."""

    def __init__(self, seed, rules, inner_rules):
        self.random = np.random.default_rng(seed)
        self.rules, self.inner_rules = rules, inner_rules  # functions(draw) -> (expression, cost)
        self.avals = {}  # {name: shape and dtype}, with a free batch
        self.levels = {}  # {name: level}; see `level`
        self.weights, self.lines, self.read = {}, [], set()
        self.rejected = []  # expressions that JAX does not accept
        self.used = []  # the names that the current expression reads

    # What the rules of the grammar call.

    def chance(self, share):
        return self.random.random() < share

    def choice(self, options):
        return options[self.random.integers(len(options))]

    def number(self, low, high):
        """A whole number from low to high."""
        return int(self.random.integers(low, high + 1))

    def value(self, kinds="f", rank=None, exact=False, like=None, where=None):
        """The name of a value; Redraw if there is none of this kind.

        `kinds` are those of NumPy's dtypes, `rank` is the least number of axes. Numbers that are
        `exact` have been computed without rounding, so that a comparison has the same result
        everywhere. `like` is a name of a value with the same shape and dtype.
        """
        names = [
            name
            for name, aval in self.avals.items()
            if (like is None or (aval.shape, aval.dtype) == self.spec(like))
            and (like is not None or aval.dtype.kind in kinds)
            and (rank is None or aval.ndim >= rank)
            and (not exact or self.levels[name] <= EXACT)
            and (where is None or where(aval))
        ]
        if not names:
            raise Redraw
        # newer values are read more often, so that models are deep
        odds = np.arange(1, len(names) + 1) ** 1.5
        name = names[self.random.choice(len(names), p=odds / odds.sum())]
        self.used.append(name)
        return name

    def spec(self, name):
        return self.avals[name].shape, self.avals[name].dtype

    def sizes(self, name):
        """The shape; the size of a free axis is None."""
        return [d if isinstance(d, int) else None for d in self.avals[name].shape]

    def axis(self, name, free=False):
        """An axis of a value; `free`: it may be one whose size is free."""
        axes = [i for i, d in enumerate(self.sizes(name)) if d or (free and d is None)]
        if not axes:
            raise Redraw
        return self.choice(axes)

    def weight(self, *shape, whole=None):
        """A new weight as an expression, of multiples of 1/4, or of whole numbers in a range."""
        low, high = whole or (-6, 7)
        array = self.random.integers(low, high, shape)
        array = array.astype(np.int32) if whole else (array / 4).astype(np.float32)
        self.weights[f"w{len(self.weights)}"] = array
        return f'w["w{len(self.weights) - 1}"]'

    def inner(self, avals):
        """An expression of these values alone, {name: shape and dtype}, as the body of a loop."""
        outer = self.avals, self.levels, self.used
        level = max((self.levels[name] for name in self.used), default=99)
        self.avals, self.levels, self.used = avals, dict.fromkeys(avals, level), []
        try:
            return self.choice(self.inner_rules)(self)[0]
        finally:
            self.avals, self.levels, self.used = outer

    # How a model is put together.

    def level(self, cost):
        """How far a result is from the inputs, which are small multiples of 1/4: 1 for each sum, 2
        for each product. An operation of cost None rounds.
        """
        levels = [self.levels[name] for name in self.used]
        return 99 if cost is None else max(levels, default=0) + cost

    def add_inputs(self, table, names, free):
        """Inputs of a table, {name: (shape, dtype, low, high)}; returns batches of 3."""
        arrays = {}
        for name in names:
            shape, dtype, low, high = table[name]
            numbers = self.random.integers(low, high, (3, *shape))
            arrays[name] = (numbers / 4 if dtype == "float32" else numbers).astype(dtype)
            self.avals[name] = jax.ShapeDtypeStruct((free, *shape), arrays[name].dtype)
            self.levels[name] = 0
        return arrays

    def add_line(self, evaluate):
        """Add one line, if its expression has a meaning for the shapes that it was drawn for."""
        self.used = []
        try:
            expression, cost = self.choice(self.rules)(self)
            reads = {name: self.avals[name] for name in self.used}
            aval = jax.eval_shape(evaluate(expression), self.weights, reads)
        except Redraw:
            return
        except Exception as error:  # JAX raises many kinds where shapes do not fit
            self.rejected.append(f"{expression}: {type(error).__name__}: {error}")
            return
        size = np.prod([d if isinstance(d, int) else d._evaluate({"batch": 3}) for d in aval.shape])
        if 0 < size <= LARGEST and aval.ndim <= 5 and aval.dtype.kind in "fiub":
            name = f"v{len(self.lines)}"
            self.lines.append(f"{name} = {expression}")
            self.avals[name] = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            self.levels[name] = 0 if aval.dtype.kind in "iub" else self.level(cost)
            self.read |= set(self.used)
