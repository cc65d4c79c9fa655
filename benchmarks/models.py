"""What the benchmarks share: networks, data, forms of training, tables.

Import it before numpy: it keeps all libraries to one thread.

.. autosummary::
    :nosignatures:

    set_up
    build
    make_batches
    compile_form
    has_softmax
    shared_variables
    wait_for
    markdown
    judge
"""

import argparse
import os
import platform
import re
import warnings
from collections import OrderedDict, namedtuple

# A library reads its variable when it is loaded, numpy's BLAS the first.
os.environ.update(
    OMP_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    NUMEXPR_NUM_THREADS="1",
)

import lasagne_accum

import lasagne
import numpy as np
import theano
import theano.gpuarray
import theano.tensor as T

MODELS = {
    "mlp800": (784, 800, 800, 10),
    "mlp2000": (784, 2000, 2000, 10),
    "cnn": None,
}
RULES = ("sgd", "momentum", "nesterov_momentum", "adam")

Network = namedtuple("Network", "inputs loss params")


def set_up(output, device="cpu"):
    """Compute in float32, with one thread or on a GPU; print with what.

    Parameters
    ----------
    output : str
        The folder for charts, to be made before the time that they take.
    device : str, optional
        One of Theano's devices.
    """
    os.makedirs(output, exist_ok=True)
    if device != "cpu":
        theano.gpuarray.use(device)
    theano.config.floatX = "float32"
    theano.config.openmp = False
    # Lasagne 0.1 uses an old name of an argument, to the same effect.
    warnings.filterwarnings("ignore", "The `image_shape` keyword argument")
    blas = theano.config.blas.ldflags or "through numpy"
    print(
        f"{processor()}, Python {platform.python_version()}, Theano "
        f"{theano.__version__} (BLAS: {blas}), numpy {np.__version__}, "
        f"{'one thread' if device == 'cpu' else device}, float32\n"
    )


def processor():
    """Name the processor."""
    try:
        with open("/proc/cpuinfo") as stream:
            fields = dict(line.split(":", 1) for line in stream if ":" in line)
        return fields["model name\t"].strip()
    except (OSError, KeyError):
        return platform.machine()


def checked_model(name):
    """Check the name of a model, for the command line."""
    if name in MODELS or re.fullmatch(r"mlp:([1-9]\d*,)+[1-9]\d*", name):
        return name
    raise argparse.ArgumentTypeError(
        f"{name!r} is none of {', '.join(MODELS)}, and not like mlp:784,800,10"
    )


def sizes(model):
    """Give the widths of an MLP's layers, None for the CNN."""
    if model in MODELS:
        return MODELS[model]
    return tuple(map(int, model[len("mlp:") :].split(",")))


def build(model):
    """Make a network, its parameters always the same to start from."""
    lasagne.random.set_rng(np.random.RandomState(0))
    x = (T.tensor4 if model == "cnn" else T.matrix)("x", dtype="float32")
    y = T.ivector("y")
    layer = lasagne.layers.InputLayer((None, *shape(model)), x)
    if model == "cnn":
        for _ in range(2):
            layer = lasagne.layers.Conv2DLayer(layer, 32, (5, 5))
            layer = lasagne.layers.MaxPool2DLayer(layer, (2, 2))
    *hidden, classes = (sizes(model) or (None, 256, 10))[1:]
    for width in hidden:
        layer = lasagne.layers.DenseLayer(layer, width)
    softmax = T.nnet.softmax if has_softmax() else None
    layer = lasagne.layers.DenseLayer(layer, classes, nonlinearity=softmax)

    predicted = lasagne.layers.get_output(layer)
    if has_softmax():
        loss = T.nnet.categorical_crossentropy(predicted, y).mean()
    else:
        labels = T.eq(y.dimshuffle(0, "x"), np.arange(classes, dtype="int32"))
        loss = T.sqr(predicted - labels).mean()
    params = lasagne.layers.get_all_params(layer, trainable=True)
    return Network([x, y], loss, params)


def has_softmax():
    """Say whether the device can run it, which OpenCL's can't."""
    contexts = theano.gpuarray.type.list_contexts()
    return not any(
        theano.gpuarray.type.get_context(name).kind == b"opencl"
        for name in contexts
    )


def shape(model):
    """Give the shape of a sample."""
    return (1, 28, 28) if model == "cnn" else sizes(model)[:1]


def make_batches(model, size, number):
    """Draw batches of random samples with random labels."""
    rng = np.random.RandomState(1)
    classes = (sizes(model) or [10])[-1]
    return [
        (
            rng.uniform(size=(size, *shape(model))).astype("float32"),
            rng.randint(classes, size=size).astype("int32"),
        )
        for _ in range(number)
    ]


def compile_form(form, network, rule, n, learning_rate=1e-4):
    """Compile a training function in one of the `FORMS`.

    Parameters
    ----------
    form : str
        A key of `FORMS`.
    network : Network
        What to train.
    rule : str
        One of the `RULES`.
    n : int
        The number of micro-batches in a window; for "microbatch=", the
        number of samples in a piece.
    learning_rate : float, optional
        The learning rate. By default so small that the gradients stay what
        they are, since their values could change the time (by denormals).

    Returns
    -------
    function
        Called with the samples and labels of a batch, it returns the loss.
    """
    return FORMS[form](network, rule, n, learning_rate=learning_rate)


def _gradients_only(network, rule, n, **kw):
    grads = T.grad(network.loss, network.params)
    outputs = [theano.Out(e, borrow=True) for e in [network.loss, *grads]]
    return theano.function(network.inputs, outputs)


def _plain(network, rule, n, **kw):
    updates = getattr(lasagne.updates, rule)(
        network.loss, network.params, **kw
    )
    return theano.function(network.inputs, network.loss, updates=updates)


def _gated(network, rule, n, gate, **kw):
    updates = lasagne_accum.with_accumulated_gradients(
        network.loss,
        network.params,
        n,
        getattr(lasagne.updates, rule),
        gate=gate,
        **kw,
    )
    return theano.function(network.inputs, network.loss, updates=updates)


def _switch(network, rule, n, **kw):
    return _gated(network, rule, n, gate="switch", **kw)


def _lazy(network, rule, n, **kw):
    return _gated(network, rule, n, gate="lazy", **kw)


def _function(network, rule, n, update_fn=None, **kw):
    return lasagne_accum.function(
        network.inputs,
        network.loss,
        network.loss,
        network.params,
        N=n,
        update_fn=update_fn or getattr(lasagne.updates, rule),
        **kw,
    )


def _in_place(network, rule, n, **kw):
    update_fn = getattr(lasagne_accum.updates, rule)
    return _function(network, rule, n, update_fn, in_place=True, **kw)


def _in_pieces(network, rule, n, **kw):
    return _function(network, rule, 1, microbatch=n, **kw)


def _summed_parameters(network, rule, n, **kw):
    """Sum updated parameters, and count in a tensor for each, as in 2017.

    What the rule keeps besides moves on every call.
    """
    updates = OrderedDict(
        getattr(lasagne.updates, rule)(network.loss, network.params, **kw)
    )
    for param in network.params:
        zeros = np.zeros_like(param.get_value(borrow=True))
        total, count = (
            theano.shared(zeros),
            theano.shared(zeros.astype("int8")),
        )
        last = T.eq(count, n - 1)
        new_total = total + updates[param]
        updates[count] = (count + 1) % n
        updates[total] = T.switch(last, T.zeros_like(total), new_total)
        updates[param] = T.switch(last, new_total / n, param)
    return theano.function(network.inputs, network.loss, updates=updates)


FORMS = OrderedDict(
    [
        ("gradients only", _gradients_only),
        ("plain rule", _plain),
        ("switch", _switch),
        ("lazy", _lazy),
        ("function", _function),
        ("in_place", _in_place),
        ("microbatch=", _in_pieces),
        ("whole batch", _plain),
        ("2017", _summed_parameters),
    ]
)


def shared_variables(train):
    """List the shared variables that a training function uses."""
    parts = [getattr(train, "accumulate", train)]
    parts += [train.apply] if hasattr(train, "apply") else []
    return list(
        OrderedDict.fromkeys(v for part in parts for v in part.get_shared())
    )


def wait_for(variables):
    """Let a GPU come to the end of its work on shared variables."""
    for variable in variables:
        if variable.type.context_name != "cpu":
            variable.get_value(borrow=True, return_internal_type=True).sync()


def markdown(header, rows):
    """Make a table, of texts, with its columns aligned."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths))
        + " |"
        for line in lines
    )


def judge(targets):
    """Print of each target whether it holds.

    Parameters
    ----------
    targets : list of tuples
        What it is, the most that it may be, a list of all values measured.
    """
    rows = []
    for what, limit, values in targets:
        value = max(values) if values else None
        holds = "not measured"
        if values:
            holds = "yes" if value <= limit else "NO"
        measured = f"{value:.3f}" if values else "-"
        rows.append([what, f"{limit:g}", measured, holds])
    print("\n" + markdown(["target", "at most", "measured", "holds"], rows))
