"""Both gates give the same bits in every mode of Theano that can run them."""

import re
from collections import OrderedDict

import lasagne_accum

import numpy as np
import pytest
from backend import NAME, RULES, T, rules, theano, theano_only

MODES = {
    "FAST_RUN": lambda: "FAST_RUN",
    "FAST_COMPILE": lambda: "FAST_COMPILE",
    "DebugMode": lambda: "DebugMode",
    "NanGuardMode": lambda: "NanGuardMode",
    "cvm": lambda: theano.Mode("cvm", "fast_run"),
    "vm": lambda: theano.Mode("vm", "fast_run"),
    "py": lambda: theano.Mode("py", "fast_run"),
    "c|py": lambda: theano.Mode("c|py", "fast_run"),
}
if NAME == "pytensor":
    MODES = {
        "FAST_COMPILE": MODES["FAST_COMPILE"],
        "cvm": MODES["cvm"],
        "numba": lambda: "NUMBA",
    }
CALLS = np.random.RandomState(0).randn(6, 2, 3)


def trained(gate, mode, names):
    """Train a parameter by each rule; return their bits after each call."""
    x, updates, params = T.dmatrix("x"), OrderedDict(), []
    for i, name in enumerate(sorted(names)):
        param = theano.shared(np.ones(3), name)
        params.append(param)
        loss = T.sqr(x.dot(param) - i).mean()
        updates.update(
            lasagne_accum.with_accumulated_gradients(
                loss, [param], 3, RULES[name], gate=gate, learning_rate=0.1
            )
        )
    train = theano.function([x], updates=updates, mode=mode)
    bits = []
    for call in CALLS:
        train(call)
        bits.append([param.get_value().tobytes() for param in params])
    return bits


@pytest.mark.parametrize(
    "mode",
    [
        mode
        if mode in ("FAST_COMPILE", "py")
        else pytest.param(mode, marks=pytest.mark.compiled)
        for mode in sorted(MODES)
    ],
)
def test_gates_give_the_same_bits_for_every_rule(mode, monkeypatch):
    monkeypatch.setattr(theano.config, "floatX", "float64")

    # DebugMode runs each operation in many ways, and so a single rule.
    names = ["momentum"] if mode == "DebugMode" else RULES
    switch, lazy = (
        trained(gate, MODES[mode](), names) for gate in ("switch", "lazy")
    )

    assert switch == lazy
    assert switch[0] == switch[1] != switch[2] == switch[4] != switch[5]


@theano_only
def test_lazy_gate_tells_what_to_do_under_the_linker_that_cannot_run_it():
    message = (
        '`gate` must be "switch" under the linker c, got "lazy". Take another '
        "linker (cvm, vm, c|py, py), or that gate."
    )
    w = theano.shared(np.ones(2), "w")
    updates = lasagne_accum.with_accumulated_gradients(
        w.sum(), [w], 2, rules.sgd, gate="lazy", learning_rate=0.5
    )

    with pytest.raises(NotImplementedError, match=re.escape(message)):
        theano.function([], updates=updates, mode=theano.Mode("c", "fast_run"))


@theano_only
@pytest.mark.parametrize("flags", ["", "-lblas"])
def test_gemm_adds_to_accumulators_only_where_a_blas_is_linked(
    flags, monkeypatch
):
    if hasattr(theano.config, "blas__ldflags"):
        monkeypatch.setattr(theano.config, "blas__ldflags", flags)
    else:
        monkeypatch.setattr(theano.config.blas, "ldflags", flags)
    W, x = theano.shared(np.ones((3, 1)), "W"), T.dmatrix("x")
    loss = T.sqr(x.dot(W)).sum() / 2
    accumulate, _, _ = lasagne_accum.accumulate_gradients(loss, [W])
    collect = theano.function(
        [x], updates=accumulate, mode=theano.Mode("py", "fast_run")
    )

    collect([[1, 2, 3]])
    collect([[1, 0, 0]])

    nodes = collect.maker.fgraph.toposort()
    assert any("Gemm" in str(node.op) for node in nodes) is bool(flags)
    [sums] = [v for v in accumulate if v.name == "W_accumulator"]
    np.testing.assert_array_equal(sums.get_value(), [[7], [12], [18]])
