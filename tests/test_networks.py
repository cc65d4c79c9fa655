"""Whole networks: N micro-batches train as the whole batch does."""

from collections import OrderedDict

import lasagne_accum

import lasagne
import numpy as np
import pytest
import theano
import theano.tensor as T
from lasagne.layers import (
    Conv2DLayer,
    DenseLayer,
    DropoutLayer,
    InputLayer,
    LSTMLayer,
    MaxPool2DLayer,
    get_all_params,
    get_output,
)

pytestmark = pytest.mark.filterwarnings(
    # Lasagne 0.1 calls Theano by names of its time.
    "ignore:The `image_shape` keyword"
)
# Sums of a few hundred terms of about 1, in another order.
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}


def seeded(seed=0):
    lasagne.random.set_rng(np.random.RandomState(seed))
    return np.random.RandomState(seed)


def trained_alike(params, whole, pieces, dtype):
    """Train from the same start in two ways; compare all parameters."""
    start = [param.get_value() for param in params]
    whole()
    expected = [param.get_value() for param in params]
    for param, value in zip(params, start):
        param.set_value(value)
    pieces()
    for param, value, first in zip(params, expected, start):
        assert np.any(value != first), param
        np.testing.assert_allclose(
            param.get_value(), value, rtol=0, atol=TOLERANCE[dtype]
        )


@pytest.mark.compiled
def test_cnn_trains_as_on_the_whole_batch(monkeypatch):
    # One dtype, since Theano can run a CNN in compiled C only.
    floatX = "float32"
    monkeypatch.setattr(theano.config, "floatX", floatX)
    rng = seeded()
    x, y = T.tensor4("x"), T.ivector("y")
    network = InputLayer((None, 1, 8, 8), x)
    network = MaxPool2DLayer(Conv2DLayer(network, 4, (3, 3)), 2)
    network = DenseLayer(network, 3, nonlinearity=T.nnet.softmax)
    loss = T.nnet.categorical_crossentropy(get_output(network), y).mean()
    params = get_all_params(network, trainable=True)
    rule = {"update_fn": lasagne.updates.nesterov_momentum}
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    plain = theano.function(
        [x, y], updates=rule["update_fn"](loss, params, **settings)
    )
    train = lasagne_accum.function(
        [x, y], loss, loss, params, N=3, **rule, **settings
    )
    X = rng.rand(2, 12, 1, 8, 8).astype(floatX)
    Y = rng.randint(3, size=(2, 12)).astype("int32")

    def pieces():
        for batch, targets in zip(X, Y):
            for i in range(0, 12, 4):
                train(batch[i : i + 4], targets[i : i + 4])

    trained_alike(
        params, lambda: [plain(*pair) for pair in zip(X, Y)], pieces, floatX
    )


@pytest.mark.usefixtures("fast_compile")
def test_dropout_draws_a_mask_for_each_micro_batch():
    rng = seeded(1)
    x = T.matrix("x")
    network = DropoutLayer(InputLayer((None, 50), x), p=0.5)
    dropped = get_output(network)
    w = theano.shared(np.ones(50, theano.config.floatX), "w")
    loss = (dropped * w).mean()
    updates = lasagne_accum.with_accumulated_gradients(
        loss, [w], 3, lasagne.updates.sgd, learning_rate=1.0
    )
    train = theano.function([x], dropped, updates=updates)
    X = rng.rand(3, 4, 50).astype(theano.config.floatX)

    seen = [train(micro_batch) for micro_batch in X]

    assert len({(mask == 0).tobytes() for mask in seen}) == 3
    step = np.mean(seen, axis=(0, 1)) / 50
    np.testing.assert_allclose(w.get_value(), 1 - step, rtol=1e-5)


@pytest.mark.usefixtures("fast_compile")
def test_lstm_on_masked_sequences_trains_as_on_the_whole_batch(floatX):
    rng = seeded()
    x, mask, y = T.tensor3("x"), T.matrix("mask"), T.tensor3("y")
    network = LSTMLayer(
        InputLayer((None, 6, 2), x), 3, mask_input=InputLayer((None, 6), mask)
    )
    error = T.sqr(get_output(network) - y).sum(axis=2)
    loss = (error * mask).sum() / mask.sum()
    params = get_all_params(network, trainable=True)
    plain = theano.function(
        [x, mask, y], updates=lasagne.updates.adam(loss, params)
    )
    updates = lasagne_accum.with_accumulated_gradients(
        loss, params, 3, lasagne.updates.adam, weight=mask.sum()
    )
    train = theano.function([x, mask, y], updates=updates)
    lengths = np.array([6, 1, 2, 5, 3, 6, 1, 4])
    X = rng.randn(8, 6, 2).astype(floatX)
    M = (np.arange(6) < lengths[:, None]).astype(floatX)
    Y = rng.randn(8, 6, 3).astype(floatX)

    def pieces():
        for piece in (slice(0, 3), slice(3, 4), slice(4, 8)):
            train(X[piece], M[piece], Y[piece])

    trained_alike(params, lambda: plain(X, M, Y), pieces, floatX)


@pytest.mark.usefixtures("fast_compile")
def test_ragged_last_batch_counts_by_its_samples(floatX):
    rng = seeded()
    x = T.matrix("x")
    w = theano.shared(rng.randn(5).astype(floatX), "w")
    loss = T.sqr(x.dot(w) - 1).mean()
    rule = {"learning_rate": 0.1}
    plain = theano.function(
        [x], updates=lasagne.updates.sgd(loss, [w], **rule)
    )
    updates = lasagne_accum.with_accumulated_gradients(
        loss, [w], 4, lasagne.updates.sgd, weight=x.shape[0], **rule
    )
    train = theano.function([x], updates=updates)
    X = rng.randn(37, 5).astype(floatX)

    trained_alike(
        [w],
        lambda: plain(X),
        lambda: [train(X[i : i + 10]) for i in range(0, 37, 10)],
        floatX,
    )


@pytest.mark.usefixtures("fast_compile")
def test_tied_weights_train_as_on_the_whole_batch(floatX):
    rng = seeded()
    x = T.matrix("x")
    W = theano.shared(rng.randn(6, 3).astype(floatX), "W")
    loss = T.sqr(T.tanh(x.dot(W)).dot(W.T) - x).mean()
    rule = {"learning_rate": 0.1}
    plain = theano.function(
        [x], updates=lasagne.updates.momentum(loss, [W], **rule)
    )
    train = lasagne_accum.function(
        [x],
        None,
        loss,
        [W],
        microbatch=5,
        update_fn=lasagne.updates.momentum,
        **rule,
    )
    X = rng.randn(12, 6).astype(floatX)

    trained_alike([W], lambda: plain(X), lambda: train(X), floatX)


@pytest.mark.usefixtures("fast_compile")
def test_two_losses_with_windows_of_their_own_share_one_function(floatX):
    rng = seeded()
    z = T.matrix("z")
    G = theano.shared(rng.randn(4, 3).astype(floatX), "G")
    D = theano.shared(rng.randn(3).astype(floatX), "D")
    fooled = T.nnet.sigmoid(T.tanh(z.dot(G)).dot(D)).mean()
    losses = OrderedDict([(G, (-fooled, 2)), (D, (fooled, 3))])
    updates = OrderedDict()
    for param, (loss, N) in losses.items():
        updates.update(
            lasagne_accum.with_accumulated_gradients(
                loss, [param], N, lasagne.updates.adam
            )
        )
    train = theano.function([z], updates=updates)

    moved = []
    for _ in range(6):
        before = G.get_value(), D.get_value()
        train(rng.randn(5, 4).astype(floatX))
        moved.append(
            tuple(
                bool(np.any(new.get_value() != old))
                for new, old in zip((G, D), before)
            )
        )

    assert moved == [
        (False, False),
        (True, False),
        (False, True),
        (True, False),
        (False, False),
        (True, True),
    ]
