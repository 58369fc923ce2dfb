"""Mixture-of-experts layers for axcore.

``MoE`` takes the place of any feed-forward layer, by hand or with the modifier ``MoEModifier``
(``--modifier axlearn-moe:moe:num_experts=8,top_k=2``)::

    cfg = experiments.get("tiny-lm")
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=8, top_k=2))

Its parts are slots: ``router``, ``experts``, ``dispatch``, ``shared_experts`` and ``losses``.

Names are loaded on first use, so importing the package (and registering it) imports no JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axcore.lazy import lazy_attributes

__version__ = "0.1.0"

# name -> module that defines it
_PUBLIC = {
    "MoE": "axlearn_moe._moe",
    "MoEModifier": "axlearn_moe._modifier",
    "BaseRouter": "axlearn_moe._routers",
    "TopKRouter": "axlearn_moe._routers",
    "Top2RandomRouter": "axlearn_moe._other_routers",
    "ExpertChoiceRouter": "axlearn_moe._other_routers",
    "HashRouter": "axlearn_moe._other_routers",
    "BaseExperts": "axlearn_moe._experts",
    "Experts": "axlearn_moe._experts",
    "ClampedGLU": "axlearn_moe._experts",
    "BaseDispatch": "axlearn_moe._dispatch",
    "EinsumDispatch": "axlearn_moe._dispatch",
    "GroupedDispatch": "axlearn_moe._dispatch",
    "RouterLoss": "axlearn_moe._balance",
    "LoadBalanceLoss": "axlearn_moe._balance",
    "SequenceBalanceLoss": "axlearn_moe._balance",
    "RouterZLoss": "axlearn_moe._balance",
    "Routing": "axlearn_moe._routing",
    "Upcycled": "axlearn_moe._upcycling",
    "upcycle_directory": "axlearn_moe._upcycling",
    "upcycle_state": "axlearn_moe._upcycling",
}

__all__ = [
    "BaseDispatch",
    "BaseExperts",
    "BaseRouter",
    "ClampedGLU",
    "EinsumDispatch",
    "ExpertChoiceRouter",
    "Experts",
    "GroupedDispatch",
    "HashRouter",
    "LoadBalanceLoss",
    "MoE",
    "MoEModifier",
    "RouterLoss",
    "RouterZLoss",
    "Routing",
    "SequenceBalanceLoss",
    "Top2RandomRouter",
    "TopKRouter",
    "Upcycled",
    "__version__",
    "upcycle_directory",
    "upcycle_state",
]

if TYPE_CHECKING:
    from axlearn_moe._balance import LoadBalanceLoss as LoadBalanceLoss
    from axlearn_moe._balance import RouterLoss as RouterLoss
    from axlearn_moe._balance import RouterZLoss as RouterZLoss
    from axlearn_moe._balance import SequenceBalanceLoss as SequenceBalanceLoss
    from axlearn_moe._dispatch import BaseDispatch as BaseDispatch
    from axlearn_moe._dispatch import EinsumDispatch as EinsumDispatch
    from axlearn_moe._dispatch import GroupedDispatch as GroupedDispatch
    from axlearn_moe._experts import BaseExperts as BaseExperts
    from axlearn_moe._experts import ClampedGLU as ClampedGLU
    from axlearn_moe._experts import Experts as Experts
    from axlearn_moe._modifier import MoEModifier as MoEModifier
    from axlearn_moe._moe import MoE as MoE
    from axlearn_moe._other_routers import ExpertChoiceRouter as ExpertChoiceRouter
    from axlearn_moe._other_routers import HashRouter as HashRouter
    from axlearn_moe._other_routers import Top2RandomRouter as Top2RandomRouter
    from axlearn_moe._routers import BaseRouter as BaseRouter
    from axlearn_moe._routers import TopKRouter as TopKRouter
    from axlearn_moe._routing import Routing as Routing
    from axlearn_moe._upcycling import Upcycled as Upcycled
    from axlearn_moe._upcycling import upcycle_directory as upcycle_directory
    from axlearn_moe._upcycling import upcycle_state as upcycle_state

__getattr__, __dir__ = lazy_attributes(globals(), _PUBLIC)
