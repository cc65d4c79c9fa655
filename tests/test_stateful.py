"""Any sequence of calls leaves what the NumPy reference says, in each form."""

import copy
import functools
from collections import OrderedDict

import lasagne_accum

import numpy as np
import pytest
import reference
from backend import RULES, T, broadcast, lasagne_only, theano
from forms import FORMS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

SHAPES = {"scalar": (), "empty": (0, 3), "row": (1, 3), "matrix": (2, 3)}
# A few dozen steps, each with a rounding or two of values of about 1.
TOLERANCE = {"float32": 1e-4, "float64": 1e-11}


@functools.lru_cache(maxsize=None)
def compiled(form, name, dtype, skip_nonfinite):
    """Compile a form once; its first state is that of every run."""
    params = OrderedDict(
        (
            key,
            theano.shared(
                np.ones(shape, dtype),
                key,
                **broadcast(*(axis == 1 for axis in shape)),
            ),
        )
        for key, shape in SHAPES.items()
    )
    grads = [param.type() for param in params.values()]
    weight = T.scalar("weight", dtype="float64")
    rule = RULES[name]
    if form == "drop-in":
        rule = getattr(lasagne_accum.updates, name)
    subject = FORMS[form](
        grads,
        list(params.values()),
        weight,
        functools.partial(rule, learning_rate=0.125),
        skip_nonfinite=skip_nonfinite,
    )
    return subject, list(params.values()), subject.get_state()


class Training(RuleBasedStateMachine):
    """One training, made of all that can happen to it."""

    form = None

    @initialize(
        name=st.sampled_from(sorted(RULES)),
        skip_nonfinite=st.booleans(),
        N=st.integers(1, 4),
    )
    def start(self, name, skip_nonfinite, N):
        dtype = theano.config.floatX
        self.subject, self.params, first = compiled(
            self.form, name, dtype, skip_nonfinite
        )
        self.subject.set_state(first)
        self.subject.set_N(N)
        rule, defaults = reference.RULES[name]
        self.model = reference.Window(
            [param.get_value() for param in self.params],
            rule,
            N,
            skip_nonfinite=skip_nonfinite,
            **dict(defaults, learning_rate=0.125),
        )
        self.tolerance = TOLERANCE[dtype]
        self.saved = None

    @rule(
        seed=st.integers(0, 2**20),
        weight=st.sampled_from(
            [0.0, 1.0, 1.0, 2.0, 5.0, -1.0, np.nan, np.inf]
        ),
        poison=st.sampled_from([None] * 6 + [np.nan, np.inf, -np.inf]),
    )
    def call(self, seed, weight, poison):
        # Eighths, whose weighted sums are exact.
        rng = np.random.RandomState(seed)
        grads = [
            np.asarray(
                rng.randint(-8, 9, param.get_value().shape) / 8.0
            ).astype(param.dtype)
            for param in self.params
        ]
        if poison is not None:
            grads[3][rng.randint(2), rng.randint(3)] = poison
        before = self.subject.get_state()

        updated = self.subject.call(grads, weight)

        assert updated == self.model.call(grads, weight)
        if not updated:
            self.nothing_moved(before)

    def nothing_moved(self, before):
        for name, value in self.subject.get_state().items():
            if "accumulator" not in name and "window" not in name:
                np.testing.assert_array_equal(value, before[name])

    @rule()
    def flush(self):
        assert self.subject.flush() == self.model.flush()

    @rule()
    def reset(self):
        before = self.subject.get_state()
        self.subject.reset()
        self.model.reset()
        self.nothing_moved(before)

    @rule(N=st.integers(1, 6))
    def change_N(self, N):
        self.subject.set_N(N)
        self.model.N = N

    @rule()
    def save(self):
        self.saved = self.subject.get_state(), copy.deepcopy(self.model)

    @precondition(lambda self: self.saved)
    @rule()
    def restore(self):
        state, model = self.saved
        N = self.model.N
        self.subject.set_state(state)
        self.model = copy.deepcopy(model)
        self.model.N = N

    @invariant()
    def equals_the_reference(self):
        if not hasattr(self, "model"):
            return
        assert self.subject.pending == self.model.pending
        assert self.subject.skipped == self.model.skipped
        for param, value in zip(self.params, self.model.params):
            np.testing.assert_allclose(
                finite(param.get_value()),
                finite(value),
                rtol=self.tolerance,
                atol=self.tolerance,
                err_msg=param.name,
            )


def finite(value):
    """Take infinities for NaNs, which Lasagne's momentum makes of them.

    It computes ``x - param``, which its own equations do not.
    """
    return np.where(np.isfinite(value), value, np.nan)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=lasagne_only) if form == "drop-in" else form
        for form in sorted(FORMS)
    ],
)
def test_any_sequence_of_calls_leaves_what_the_reference_says(
    form, fast_compile
):
    machine = type(form, (Training,), {"form": form})

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
