"""Every form of accumulation behind one interface, to drive them alike."""

import functools
from collections import OrderedDict

import lasagne_accum
from lasagne_accum import state

from backend import theano

MODE = "FAST_COMPILE"


class Single:
    """The single-function form: N is a shared variable."""

    def __init__(
        self, gate, grads, params, weight, rule, mode=MODE, **options
    ):
        self.N = theano.shared(1)
        self.updates = self.make(
            rule, grads, params, gate=gate, weight=weight, **options
        )
        self.train = theano.function(
            [*grads, weight],
            self.updates.updated,
            updates=self.updates,
            mode=mode,
        )
        for name in ("flush", "reset", "get_state", "set_state"):
            setattr(self, name, getattr(self.updates, name))

    def make(self, rule, grads, params, **options):
        return lasagne_accum.with_accumulated_gradients(
            grads, params, self.N, rule, **options
        )

    def call(self, grads, weight):
        return bool(self.train(*grads, weight))

    def set_N(self, N):
        self.N.set_value(N)

    @property
    def pending(self):
        return int(self.updates.counter.get_value())

    @property
    def skipped(self):
        return self.updates.skipped


class DropIn(Single):
    """A rule of `lasagne_accum.updates`, with `average=`."""

    def make(self, rule, grads, params, **options):
        return rule(grads, params, average=self.N, **options)


class ByHand:
    """Two functions of `accumulate_gradients`, called by turns."""

    def __init__(self, grads, params, weight, rule, mode=MODE, **options):
        accumulate, means, reset = lasagne_accum.accumulate_gradients(
            grads, params, weight=weight, **options
        )
        apply = rule(means, params)
        apply.update(reset)
        self.variables = list(OrderedDict.fromkeys([*accumulate, *apply]))
        self.named = {variable.name: variable for variable in accumulate}

        compiled = functools.partial(theano.function, mode=mode)
        self.collect = compiled([*grads, weight], updates=accumulate)
        self.apply = compiled([], updates=apply)
        self.reset = compiled([], updates=reset)

    def call(self, grads, weight):
        before = self.pending
        self.collect(*grads, weight)
        return before < self.pending >= self.N and self.flush()

    def flush(self):
        if self.named["window_weight"].get_value() == 0:
            self.reset()
            return False
        self.apply()
        return True

    def set_N(self, N):
        self.N = N

    def get_state(self):
        return state.read(self.variables)

    def set_state(self, values):
        state.restore(self.variables, values)

    @property
    def pending(self):
        return int(self.named["window_counter"].get_value())

    @property
    def skipped(self):
        skipped = self.named.get("window_skipped")
        return int(skipped.get_value()) if skipped is not None else 0


class Runner:
    """The two functions, run by `lasagne_accum.function`."""

    def __init__(self, grads, params, weight, rule, mode=MODE, **options):
        self.train = lasagne_accum.function(
            [*grads, weight],
            None,
            grads,
            params,
            update_fn=rule,
            weight=weight,
            mode=mode,
            **options,
        )
        for name in ("flush", "reset", "get_state", "set_state"):
            setattr(self, name, getattr(self.train, name))

    def call(self, grads, weight):
        self.train(*grads, weight)
        return self.train.updated

    def set_N(self, N):
        self.train.N = N

    @property
    def pending(self):
        return self.train.pending

    @property
    def skipped(self):
        return self.train.skipped


FORMS = OrderedDict(
    [
        ("switch", functools.partial(Single, "switch")),
        ("lazy", functools.partial(Single, "lazy")),
        ("drop-in", functools.partial(DropIn, "switch")),
        ("by hand", ByHand),
        ("function", Runner),
    ]
)
