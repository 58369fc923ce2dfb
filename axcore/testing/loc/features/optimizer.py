"""A new optimizer: steps of one size in the direction of the gradient's sign."""
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402, F811

# %% feature
import jax
import jax.numpy as jnp
import optax


def sign_descent(learning_rate):
    """Returns the optax transformation ``-learning_rate * sign(gradient)``."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda g: -learning_rate * jnp.sign(g), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# %% integration
from axcore import config_for

from .feature import sign_descent


def integrate(cfg):
    """Trains with it."""
    cfg.learner.set(optimizer=config_for(sign_descent, learning_rate=0.01))


# %% check
import jax
import numpy as np

from .feature import sign_descent


def is_present(cfg, model):
    """Whether the learner has it."""
    return list(cfg.find(sign_descent)) == ["learner.optimizer"]


def check(probe):
    """Updates have one magnitude; those of the optimizer before do not."""

    def updates(cfg):
        optimizer = cfg.learner.optimizer.instantiate()
        # As first gradients: any values will do, and zeros must not move.
        params = {"w": probe.before_params["embedding"]["weight"]}
        gradients = jax.tree.map(lambda x: x.at[0].set(0.0), params)
        state = optimizer.init(params)
        for _ in range(2):
            moved, state = optimizer.update(gradients, state, params)
            gradients = jax.tree.map(lambda x: x * 0.5, gradients)
        return np.asarray(moved["w"])

    after, before = updates(probe.after), updates(probe.before)
    probe.same(np.abs(after[1:]), np.full_like(after[1:], 0.01), "every step is 0.01 long")
    probe.require(not after[0].any(), "where the gradient is 0 nothing moves")
    probe.differ(after, before, "the optimizer before made other steps")
