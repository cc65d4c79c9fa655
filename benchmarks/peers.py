"""The MLP of the benchmarks in other libraries, trained by their own Adam.

Each maker takes the widths of the layers and the number of micro-batches in
a window. What it returns has a method `prepare`, which takes a window's
micro-batches and returns a function that trains on them. Nothing is read
back within a window.
"""

import types


def torch_adam(sizes, N, learning_rate=1e-4):
    """Divide each loss by N, go backward N times, step once."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = []
    for pair in zip(sizes, sizes[1:]):
        layers += [torch.nn.Linear(*pair), torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(network.parameters(), lr=learning_rate)
    cross_entropy = torch.nn.CrossEntropyLoss()

    def prepare(batches):
        tensors = [
            (torch.from_numpy(x), torch.from_numpy(y).long())
            for x, y in batches
        ]

        def run():
            optimizer.zero_grad()
            for x, y in tensors:
                (cross_entropy(network(x), y) / N).backward()
            optimizer.step()

        return run

    return types.SimpleNamespace(prepare=prepare)


def optax_adam(sizes, N, learning_rate=1e-4):
    """Train with ``optax.MultiSteps``, compiled by JAX."""
    import jax
    import optax

    keys = jax.random.split(jax.random.PRNGKey(0), len(sizes))
    glorot = jax.nn.initializers.glorot_uniform()
    params = [
        (glorot(key, pair), jax.numpy.zeros(pair[1]))
        for key, pair in zip(keys, zip(sizes, sizes[1:]))
    ]
    optimizer = optax.MultiSteps(optax.adam(learning_rate), every_k_schedule=N)
    state = optimizer.init(params)

    def mean_loss(params, x, y):
        for W, b in params[:-1]:
            x = jax.nn.relu(x @ W + b)
        W, b = params[-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ W + b, y)
        return losses.mean()

    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(mean_loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(step, donate_argnums=(0, 1))

    def prepare(batches):
        arrays = [tuple(map(jax.numpy.asarray, batch)) for batch in batches]

        def run():
            nonlocal params, state
            for x, y in arrays:
                params, state, _ = step(params, state, x, y)
            jax.block_until_ready(params)

        return run

    return types.SimpleNamespace(prepare=prepare)
