"""A Flax NNX module as a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, Required
from axcore.config import Config as AnyConfig
from axcore.errors import ModuleError
from axcore.interop._foreign import ForeignLayer, ForeignLeaf, imported, segment

__all__ = ["NNXLayer"]


class NNXLayer(ForeignLayer):
    """A module of Flax NNX.

    ``nnx.Param`` variables are parameters, other ones (``BatchStat``) state that the module sets.
    Random streams are no state here: in each call they start from a key of our context. The module
    is in training or evaluation mode as our call is. The names that partition a variable are its
    logical axes unless ``axes`` says otherwise; what it sows is a module output.

    Example:
        >>> cfg = NNXLayer.Config(
        ...     module=partial_for(flax.nnx.Linear, in_features=64, out_features=64),
        ...     axes={"kernel": ("embed", "mlp")},
        ... )  # doctest: +SKIP
    """

    class Config(ForeignLayer.Config):
        """``module`` makes the module when called with ``rngs``."""

        module: Required[AnyConfig] = REQUIRED

    def _describe(self) -> Sequence[ForeignLeaf]:
        nnx = self._nnx = imported("flax.nnx", self)
        self._graphs: dict[bool, Any] = {}
        key = jax.eval_shape(lambda: jax.random.key(0))
        for mode in (False, True):
            abstract = jax.eval_shape(lambda key, mode=mode: self._build(key, mode), key)
        self._tree = jax.tree.structure(abstract)
        found: list[tuple[ForeignLeaf, Any]] = []
        for path, variable in _variables(nnx, abstract):
            is_parameter = isinstance(variable, nnx.Param)
            leaves = jax.tree.leaves(variable)
            for n, leaf in enumerate(leaves):
                place = path if len(leaves) == 1 else (*path, str(n))
                metadata = variable.get_metadata()
                names = metadata.get("out_sharding") or metadata.get("sharding_names")
                axes = tuple(names) if names and len(names) == len(leaf.shape) else None
                kind = "parameter" if is_parameter else "state"
                found.append((ForeignLeaf(place, leaf.shape, leaf.dtype, kind, axes), variable))
        self._is_random = [isinstance(v, nnx.RngState) for _, v in found]
        self._random = [leaf for leaf, v in found if isinstance(v, nnx.RngState)]
        return [leaf for leaf, v in found if not isinstance(v, nnx.RngState)]

    def _build(self, key: jax.Array, training: bool) -> Any:
        """Returns the module's state, and keeps its structure."""
        nnx = self._nnx
        # The sharding that a variable names is given to arrays by our rules, not at its creation.
        with nnx.use_eager_sharding(False):
            module: Any = self.cfg.module.instantiate()(rngs=nnx.Rngs(key))
            if training:
                module.train()
            else:
                module.eval()
            self._graphs[training], state = nnx.split(module)
        return state

    def _make(self, key: jax.Array) -> Sequence[jax.Array]:
        leaves = jax.tree.leaves(self._build(_typed(key), True))
        return [x for x, random in zip(leaves, self._is_random, strict=True) if not random]

    def _apply(
        self, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[int, Any]]:
        ctx, nnx = self._context, self._nnx
        key = self._key()
        streams = self._streams(jax.random.key(0) if key is None else key)
        own, random = iter(values), iter(streams)
        leaves = [next(random) if is_random else next(own) for is_random in self._is_random]
        state = jax.tree.unflatten(self._tree, leaves)
        with nnx.use_eager_sharding(False):
            module = nnx.merge(self._graphs[ctx.is_training], state)
            outputs, sown = nnx.capture(module, nnx.Intermediate)(*args, **kwargs)
            _, after = nnx.split(module)
        for path, variable in _variables(nnx, sown):
            ctx.add_output("/".join(path), variable.get_value())
        return outputs, self._changes(nnx, after, values, streams if key is None else None)

    def _key(self) -> jax.Array | None:
        """Returns a key for the module's random streams; None when there is none to have."""
        if not self._random:
            return None
        try:
            return _typed(self._context.key())
        except ModuleError as error:
            if error.code != "AX321" or self._context.is_training:
                raise
            return None  # fine in evaluation, unless the module draws

    def _streams(self, key: jax.Array) -> list[jax.Array]:
        made: list[jax.Array] = []
        for n, leaf in enumerate(self._random):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                own = jax.random.fold_in(key, n)
                made.append(jax.random.split(own, leaf.shape) if leaf.shape else own)
            else:
                made.append(jnp.zeros(leaf.shape, leaf.dtype))
        return made

    def _changes(
        self, nnx: Any, after: Any, values: Sequence[Any], keyless: Sequence[Any] | None
    ) -> dict[int, Any]:
        """Returns the new values of states."""
        before = {leaf.path: n for n, leaf in enumerate(self._leaves)}
        random = {leaf.path: n for n, leaf in enumerate(self._random)}
        updates: dict[int, Any] = {}
        for path, variable in _variables(nnx, after):
            leaves = jax.tree.leaves(variable)
            for n, leaf in enumerate(leaves):
                place = path if len(leaves) == 1 else (*path, str(n))
                if place in random:
                    if keyless is not None and leaf is not keyless[random[place]]:
                        raise ModuleError(
                            f"{'/'.join(path)} draws a random number but no key was given",
                            code="AX321",
                            where=self.path,
                            hint="pass key=jax.random.key(...) to functional",
                        )
                elif place not in before:
                    raise ModuleError(
                        f"the module makes the variable {'/'.join(place)!r} in a call; a layer's "
                        "state is described before it exists",
                        code="AX374",
                        where=self.path,
                        hint="make it when the module is made; sow what is only to be looked at",
                    )
                elif leaf is not values[before[place]]:
                    if self._leaves[before[place]].kind == "parameter":
                        raise ModuleError(
                            f"the module sets its parameter {'/'.join(place)!r} in a call; "
                            "parameters are changed by the learner only",
                            code="AX374",
                            where=self.path,
                            hint="make it another kind of nnx.Variable, which is a state here",
                        )
                    updates[before[place]] = leaf
        return updates


def _variables(nnx: Any, state: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns (path, variable) in the order in which a state flattens."""
    flat, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return [(tuple(map(segment, path)), variable) for path, variable in flat]


def _typed(key: jax.Array) -> jax.Array:
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key if is_typed else jax.random.wrap_key_data(key)
