"""Published figures to stand beside: lines changed in a code base of 20 models x 10 variants.

From "AXLearn: Modular Large Model Training on Heterogeneous Infrastructure", arXiv:2507.05411. They
are that paper's figures; nothing of those systems is measured here.
"""

from __future__ import annotations

__all__ = ["COMPARED", "PUBLISHED", "SOURCE"]

SOURCE = "arXiv:2507.05411"

#: Names of the features that the paper compares.
COMPARED = ("rope", "moe")

#: System -> lines changed for each compared feature; None: not stated.
PUBLISHED: dict[str, tuple[int | None, int | None]] = {
    "Megatron-LM": (400, 20),
    "DeepSpeed": (320, 4000),
    "TorchTitan": (240, 400),
    "Flax": (600, None),
    "Praxis": (300, 5),
    "MaxText": (200, 300),
    "AXLearn": (0, 0),
}
