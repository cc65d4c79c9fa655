"""What the benchmarks share: networks, data, forms of training, tables.

Import it before numpy: it keeps all libraries to one thread.

.. autosummary::
    :nosignatures:

    set_up
    build
    make_batches
    compile_form
    shared_variables
    wait_for
    markdown
    judge
"""

import argparse
import importlib
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

import numpy as np

MODELS = {
    "mlp800": (784, 800, 800, 10),
    "mlp2000": (784, 2000, 2000, 10),
    "cnn": None,
}
RULES = ("sgd", "momentum", "nesterov_momentum", "adam")

# Theano or PyTensor, and the module of its rules, go with what they train.
Network = namedtuple("Network", "inputs loss params theano rules")


def set_up(output, device="cpu", backend="theano", mode=None):
    """Compute in float32, with one thread or on a GPU; print with what.

    Parameters
    ----------
    output : str
        The folder for charts, to be made before the time that they take.
    device : str, optional
        One of Theano's devices.
    backend : str, optional
        A key of `BACKENDS`.
    mode : str, optional
        The mode of compilation. Defaults to the backend's own.
    """
    os.makedirs(output, exist_ok=True)
    theano = importlib.import_module(backend)
    importlib.import_module(BACKENDS[backend].rules)
    if device != "cpu":
        importlib.import_module("theano.gpuarray").use(device)
    theano.config.floatX = "float32"
    theano.config.openmp = False
    if mode is not None:
        theano.config.mode = mode
    # Lasagne 0.1 uses an old name of an argument, to the same effect.
    warnings.filterwarnings("ignore", "The `image_shape` keyword argument")
    print(
        f"{processor()}, Python {platform.python_version()}, {backend} "
        f"{theano.__version__} ({products(theano)}), numpy {np.__version__}, "
        f"{'one thread' if device == 'cpu' else device}, float32\n"
    )


def products(theano):
    """Say what multiplies matrices."""
    linker = theano.compile.mode.get_default_mode().linker
    # PyTensor would search for a BLAS that Numba and JAX don't link.
    if hasattr(linker, "jit_compile"):
        return type(linker).__name__
    config = theano.config
    # Theano-PyMC and PyTensor spell it in one word.
    flat = hasattr(config, "blas__ldflags")
    blas = config.blas__ldflags if flat else config.blas.ldflags
    return f"BLAS: {blas or 'through numpy'}"


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


def build(model, backend="theano"):
    """Make a network, its parameters always the same to start from."""
    theano = importlib.import_module(backend)
    rules = importlib.import_module(BACKENDS[backend].rules)
    inputs, loss, params = BACKENDS[backend].build(model)
    return Network(inputs, loss, params, theano, rules)


def _with_lasagne(model):
    import lasagne
    import theano.gpuarray
    import theano.tensor as T

    has_softmax = _has_softmax(theano.gpuarray.type)
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
    softmax = T.nnet.softmax if has_softmax else None
    layer = lasagne.layers.DenseLayer(layer, classes, nonlinearity=softmax)

    predicted = lasagne.layers.get_output(layer)
    if has_softmax:
        loss = T.nnet.categorical_crossentropy(predicted, y).mean()
    else:
        labels = T.eq(y.dimshuffle(0, "x"), np.arange(classes, dtype="int32"))
        loss = T.sqr(predicted - labels).mean()
    return [x, y], loss, lasagne.layers.get_all_params(layer, trainable=True)


def _has_softmax(gpu):
    """Say whether the device can run it, which OpenCL's can't."""
    return not any(
        gpu.get_context(name).kind == b"opencl" for name in gpu.list_contexts()
    )


def _by_hand(model):
    """Make an MLP in PyTensor, from the weights that Lasagne would draw."""
    import pytensor
    import pytensor.tensor as T

    rng = np.random.RandomState(0)
    x, y = T.matrix("x", dtype="float32"), T.ivector("y")
    layer, params = x, []
    for pair in zip(sizes(model), sizes(model)[1:]):
        limit = np.sqrt(6 / sum(pair))
        drawn = rng.uniform(-limit, limit, pair).astype("float32")
        W = pytensor.shared(drawn, "W")
        b = pytensor.shared(np.zeros(pair[1], "float32"), "b")
        layer = (T.maximum(layer, 0) if params else layer).dot(W) + b
        params += [W, b]

    log_predicted = T.special.log_softmax(layer, axis=-1)
    loss = -log_predicted[T.arange(y.shape[0]), y].mean()
    return [x, y], loss, params


Backend = namedtuple("Backend", "rules build lacks")
# What a backend lacks is named like a model, a form or an option.
BACKENDS = OrderedDict(
    theano=Backend("lasagne.updates", _with_lasagne, ()),
    pytensor=Backend(
        "pymc.variational.updates", _by_hand, ("cnn", "in_place", "device")
    ),
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
    theano = network.theano
    grads = theano.grad(network.loss, network.params)
    outputs = [theano.Out(e, borrow=True) for e in [network.loss, *grads]]
    return theano.function(network.inputs, outputs)


def _plain(network, rule, n, **kw):
    updates = getattr(network.rules, rule)(network.loss, network.params, **kw)
    return network.theano.function(
        network.inputs, network.loss, updates=updates
    )


def _gated(network, rule, n, gate, **kw):
    updates = lasagne_accum.with_accumulated_gradients(
        network.loss,
        network.params,
        n,
        getattr(network.rules, rule),
        gate=gate,
        **kw,
    )
    return network.theano.function(
        network.inputs, network.loss, updates=updates
    )


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
        update_fn=update_fn or getattr(network.rules, rule),
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
    theano, T = network.theano, network.theano.tensor
    updates = OrderedDict(
        getattr(network.rules, rule)(network.loss, network.params, **kw)
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
