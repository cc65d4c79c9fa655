"""Running averages move once for each window, where that is asked for."""

import functools
import re

import lasagne_accum

import lasagne
import numpy as np
import pytest
import theano
import theano.tensor as T
from lasagne.layers import (
    DenseLayer,
    InputLayer,
    Layer,
    get_all_layers,
    get_all_params,
    get_output,
)

pytestmark = pytest.mark.usefixtures("fast_compile")
X = np.random.RandomState(0).randn(12, 2) * 3 + 1
RULE = {"update_fn": lasagne.updates.adam, "learning_rate": 0.01}
# Sums of a dozen terms in double precision.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class BatchNorm(Layer):
    """Normalizes by the batch, and keeps averages as default updates."""

    def __init__(self, incoming, alpha=0.1):
        super().__init__(incoming)
        self.alpha = alpha
        shape = (self.input_shape[1],)
        self.mean = self.add_param(np.zeros(shape), shape, trainable=False)
        self.inv_std = self.add_param(np.ones(shape), shape, trainable=False)

    def get_output_for(self, input, deterministic=False, **kwargs):
        """Normalize, and attach the averages to what is returned."""
        if deterministic:
            return (input - self.mean) * self.inv_std
        output = input
        for own, value, apply in (
            (self.mean, input.mean(0), T.sub),
            (self.inv_std, T.inv(T.sqrt(input.var(0) + 1e-4)), T.mul),
        ):
            # A variable of its own over the same memory.
            running = theano.clone(own, share_inputs=False)
            running.default_update = (
                1 - self.alpha
            ) * running + self.alpha * value
            output = apply(output, value + 0 * running)
        return output


@pytest.fixture
def net(monkeypatch):
    monkeypatch.setattr(theano.config, "floatX", "float64")
    lasagne.random.set_rng(np.random.RandomState(0))
    x = T.dmatrix("x")
    # Lasagne 0.1 has none.
    layer = getattr(lasagne.layers, "BatchNormLayer", BatchNorm)
    norm = layer(InputLayer((None, 2), x))
    network = DenseLayer(norm, 3)
    loss = T.sqr(get_output(network)).mean()
    params = get_all_params(network, trainable=True)
    return x, norm, get_all_layers(network), loss, params


def single(gate):
    def make(x, layers, loss, params, **options):
        updates = lasagne_accum.with_accumulated_gradients(
            loss, params, 3, gate=gate, statistics=layers, **RULE, **options
        )
        return theano.function([x], updates=updates), updates.flush

    return make


def two(x, layers, loss, params, **options):
    train = lasagne_accum.function(
        [x], None, loss, params, N=3, statistics=layers, **RULE, **options
    )
    return train, train.flush


def drop_in(x, layers, loss, params, **options):
    updates = lasagne_accum.updates.adam(
        loss, params, average=3, statistics=layers, **options
    )
    return theano.function([x], updates=updates), updates.flush


FORMS = [single("switch"), single("lazy"), two, drop_in]


def moved(stats):
    """What the averages 0 become by the mean of batch statistics."""
    return 0.1 * np.mean(stats, axis=0)


@pytest.mark.parametrize("form", FORMS)
def test_averages_move_once_for_each_window_by_its_mean(form, net):
    x, norm, layers, loss, params = net
    train, _ = form(x, layers, loss, params)

    for i in (0, 4):
        train(X[i : i + 4])
        np.testing.assert_array_equal(norm.mean.get_value(), [0, 0])
        np.testing.assert_array_equal(norm.inv_std.get_value(), [1, 1])
    train(X[8:])

    means = [X[i : i + 4].mean(0) for i in (0, 4, 8)]
    np.testing.assert_allclose(norm.mean.get_value(), moved(means), **CLOSE)


def test_momentum_added_to_a_rule_leaves_the_averages_alone(net):
    x, norm, layers, loss, params = net
    updates = lasagne_accum.updates.apply_momentum(
        lasagne_accum.updates.sgd(
            loss, params, learning_rate=0.1, average=3, statistics=layers
        )
    )
    train = theano.function([x], updates=updates)

    for i in (0, 4, 8) * 2:
        train(X[i : i + 4])

    means = [X[i : i + 4].mean(0) for i in (0, 4, 8)]
    twice = 0.9 * moved(means) + moved(means)
    np.testing.assert_allclose(norm.mean.get_value(), twice, **CLOSE)


@pytest.mark.parametrize("form", FORMS)
def test_flush_moves_the_averages_by_what_was_collected(form, net):
    x, norm, layers, loss, params = net
    train, flush = form(x, layers, loss, params)

    train(X[:4])
    train(X[4:])
    flush()

    means = [X[:4].mean(0), X[4:].mean(0)]
    np.testing.assert_allclose(norm.mean.get_value(), moved(means), **CLOSE)


@pytest.mark.parametrize("form", FORMS)
def test_averages_are_weighted_as_gradients_are(form, net):
    x, norm, layers, loss, params = net
    train, _ = form(x, layers, loss, params, weight=x.shape[0])

    for piece in (slice(0, 2), slice(2, 3), slice(3, 12)):
        train(X[piece])

    expected = 0.1 * X.mean(0)
    np.testing.assert_allclose(norm.mean.get_value(), expected, **CLOSE)


def test_by_hand_reset_moves_the_averages_but_not_for_nothing(net):
    x, norm, layers, loss, params = net
    accumulate, grads, reset = lasagne_accum.accumulate_gradients(
        loss, params, statistics=layers
    )
    updates = lasagne.updates.sgd(grads, params, learning_rate=0.1)
    updates.update(reset)
    collect = theano.function([x], updates=accumulate)
    step = theano.function([], updates=updates)

    collect(X[:4])
    np.testing.assert_array_equal(norm.mean.get_value(), [0, 0])
    step()
    step()

    assert len(grads) == len(params)
    expected = moved([X[:4].mean(0)])
    np.testing.assert_allclose(norm.mean.get_value(), expected, **CLOSE)


@pytest.mark.parametrize("microbatch", [None, 2])
@pytest.mark.parametrize("place", ["outputs", "updates", "givens"])
def test_the_same_network_used_again_moves_no_average(place, microbatch, net):
    x, norm, layers, loss, params = net
    again, total = get_output(layers[-1]).sum(), T.dscalar("total")
    seen = theano.shared(0.0, "seen")
    uses = {
        "outputs": {"outputs": [again, loss]},
        "updates": {"outputs": [loss], "updates": {seen: again}},
        "givens": {"outputs": [total, loss], "givens": {total: again}},
    }
    train = lasagne_accum.function(
        [x], loss_or_grads=loss, params=params, N=3,
        statistics=layers, microbatch=microbatch, **uses[place], **RULE,
    )  # fmt: skip

    for i in (0, 4):
        train(X[i : i + 4])
        np.testing.assert_array_equal(norm.mean.get_value(), [0, 0])
    train(X[8:])

    size = microbatch or 4
    means = [X[i : i + size].mean(0) for i in range(0, 12, size)]
    np.testing.assert_allclose(norm.mean.get_value(), moved(means), **CLOSE)


def test_a_state_holds_an_average_once_however_often_it_is_used(net):
    x, _, layers, loss, params = net
    make = functools.partial(
        lasagne_accum.function, [x], loss_or_grads=loss, params=params,
        statistics=layers, **RULE,
    )  # fmt: skip
    once, twice = (
        make(outputs=outputs).get_state()
        for outputs in (loss, get_output(layers[-1]))
    )
    assert list(once) == list(twice)


def test_layers_may_have_parameters_that_are_expressions(net):
    _, norm, _, loss, params = net
    layer = Layer(norm)
    layer.params[2 * params[0]] = set()
    updates = lasagne_accum.with_accumulated_gradients(
        loss, params, 3, statistics=[layer, norm], **RULE
    )
    assert norm.mean.container in [v.container for v in updates]


def test_without_statistics_averages_move_on_each_call(net):
    x, norm, _, loss, params = net
    updates = lasagne_accum.with_accumulated_gradients(loss, params, 3, **RULE)
    train = theano.function([x], updates=updates)

    train(X[:4])

    expected = moved([X[:4].mean(0)])
    np.testing.assert_allclose(norm.mean.get_value(), expected, **CLOSE)
    assert len(updates.accumulators) == len(params)


def test_averages_are_found_in_a_list_of_gradients(net):
    x, norm, layers, loss, params = net
    updates = lasagne_accum.with_accumulated_gradients(
        theano.grad(loss, params), params, 3, statistics=layers, **RULE
    )
    train = theano.function([x], updates=updates)

    train(X[:4])

    np.testing.assert_array_equal(norm.mean.get_value(), [0, 0])
    assert len(updates.accumulators) == len(params)


@pytest.mark.parametrize("wrong", [lambda layers: layers[1], "ab", None])
def test_statistics_that_are_no_layers_are_refused(wrong, net):
    _, _, layers, loss, params = net
    wrong = wrong(layers) if callable(wrong) else wrong
    message = (
        f"`statistics` must be a list of layers, got {wrong!r}. Pass such as "
        "lasagne.layers.get_all_layers gives."
    )

    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        lasagne_accum.with_accumulated_gradients(
            loss, params, 3, statistics=wrong, **RULE
        )


def test_layers_that_the_loss_uses_twice_are_refused(net):
    x, norm, layers, loss, params = net
    norm.mean.name = norm.inv_std.name = "average"
    again = get_output(layers[-1], x + 1).mean()
    message = (
        "`statistics` must have layers that the loss uses once, got average "
        "moved by two uses. Join their inputs, or pass "
        "batch_norm_update_averages=False to one get_output."
    )

    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        lasagne_accum.with_accumulated_gradients(
            loss + again, params, 3, statistics=layers, **RULE
        )


def test_layers_without_averages_are_refused(net):
    _, _, layers, loss, params = net
    message = (
        "`statistics` must have layers whose running averages the loss moves, "
        f"got {layers[:1]} with none. Pass those that made the loss, not "
        "deterministic, or leave it out."
    )

    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        lasagne_accum.with_accumulated_gradients(
            loss, params, 3, statistics=layers[:1], **RULE
        )
