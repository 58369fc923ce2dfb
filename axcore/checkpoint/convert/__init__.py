"""Foreign models in, foreign models out, with evidence.

:func:`convert` reads a model of another framework and writes a model directory; :func:`export`
writes a model directory in another framework's format. Both go tensor by tensor.

What a family states
--------------------
A *family* is one architecture in one format. Its converter is a :class:`ModelFamily`, registered
by a plugin through ``axcore_converters`` under ``FORMAT:ARCHITECTURE``::

    @hookimpl
    def axcore_converters():
        return [
            NamedSpec("hf:ToyForCausalLM", "toy_models.toy.convert:HuggingFaceToy"),
            NamedSpec("gguf:toy", "toy_models.toy.convert:GGUFToy"),
            NamedSpec("npz:toy", "toy_models.toy.convert:NpzToy"),
        ]

The format is that of the files: ``hf`` (a directory with ``config.json`` and safetensors; the
architecture is the first of ``architectures``), ``gguf`` (``general.architecture``), ``npz`` (the
``architecture`` or ``model_type`` of a JSON text in the array ``__config__``; or else whichever
registered family's ``matches(source)`` is true).

A family says four things::

    class HuggingFaceToy(ModelFamily):
        architecture = "ToyForCausalLM"

        def config(self, foreign, infos):            # settings -> Trainer.Config
            foreign.expect("hidden_act", "silu")     # refuse what is not implemented
            foreign.skip("transformers_version")     # changes nothing; what nobody reads is listed
            cfg = experiments.get("toy-test")
            return cfg.set(model=...foreign.require("hidden_size", int)...)

        def rules(self, cfg):                        # tensors <-> parameters, both directions
            layer, ours = "model.layers.{i}", "decoder/layer/{i}"
            return [
                TensorRule("model.embed_tokens.weight", "embedding/weight"),
                TensorRule(f"{layer}.self_attn.q_proj.weight",
                           f"{ours}/attention/qkv/query/weight", TorchLinear()),
                TensorRule(f"{layer}.self_attn.o_proj.weight",
                           f"{ours}/attention/output/weight", TorchLinear(num_in=2)),
                TensorRule(f"{layer}.self_attn.q_proj.bias",
                           f"{ours}/attention/qkv/query/bias", Flatten()),
                Tied("lm_head.weight", same_as="model.embed_tokens.weight"),
                Ignored(f"{layer}.self_attn.rotary_emb.inv_freq", "computed from rope_theta"),
            ]

        def foreign_config(self, cfg):               # Trainer.Config -> config.json, for export
            return {"model_type": "toy", "hidden_size": cfg.model.model_dim, ...}

``config`` must be a pure function: it may be called with a plain dict and no infos in tests.
``param_dtype`` need not be set: the parameters become float32 unless the user says ``--dtype``.
A rule whose path fits no parameter does nothing, so one list serves members with and without
biases. ``OptionalPrefix("transformer.")`` among the rules reads files whose names lack the prefix,
``FormerSuffix("norm.weight", "norm.gamma")`` old files that write an end of names otherwise.
Parameters stand per layer (``decoder/layer/3/...``) whichever stack form the config has.
Optional: ``tokenizer(source)``, ``oracle(source)``, ``outputs(model, state, ids)`` for models that
are no causal language models, ``matches(source)``.

Transforms: ``Identity``, ``TorchLinear(num_in)``, ``Matrix(num_in)`` (untransposed), ``Flatten``,
``Transpose(axes)``, ``Offset(value, inner)`` (scales stored as a distance from one),
``PairsToHalves(inner)`` (rotary pairs side by side -> half a head apart; GGUF's q and k),
``Fused(inner, axis, groups)`` (one foreign tensor, several paths), ``Stacked(inner)`` (one foreign
tensor per expert, ``experts.{j}``, one path). A family may define its own: a frozen dataclass
derived from ``OneToOne`` (``ours``, ``foreign``) or ``Transform``.
"""

from axcore.checkpoint.convert._engine import Progress, convert
from axcore.checkpoint.convert._evidence import transformers_model
from axcore.checkpoint.convert._export import export
from axcore.checkpoint.convert._family import ModelFamily, Oracle, Settings, family_of, load_family
from axcore.checkpoint.convert._gguf import GGUFSource
from axcore.checkpoint.convert._huggingface import SafetensorsSource
from axcore.checkpoint.convert._npz import NpzSource
from axcore.checkpoint.convert._open import open_source
from axcore.checkpoint.convert._report import Comparison, ConversionReport, MappedTensor
from axcore.checkpoint.convert._rules import (
    FormerSuffix,
    Ignored,
    OptionalPrefix,
    Rule,
    TensorRule,
    Tied,
)
from axcore.checkpoint.convert._source import TensorInfo, TensorSource
from axcore.checkpoint.convert._transforms import (
    Flatten,
    Fused,
    Identity,
    Matrix,
    Offset,
    OneToOne,
    PairsToHalves,
    Stacked,
    TorchLinear,
    Transform,
    Transpose,
)

__all__ = [
    "Comparison",
    "ConversionReport",
    "Flatten",
    "FormerSuffix",
    "Fused",
    "GGUFSource",
    "Identity",
    "Ignored",
    "MappedTensor",
    "Matrix",
    "ModelFamily",
    "NpzSource",
    "Offset",
    "OneToOne",
    "OptionalPrefix",
    "Oracle",
    "PairsToHalves",
    "Progress",
    "Rule",
    "SafetensorsSource",
    "Settings",
    "Stacked",
    "TensorInfo",
    "TensorRule",
    "TensorSource",
    "Tied",
    "TorchLinear",
    "Transform",
    "Transpose",
    "convert",
    "export",
    "family_of",
    "load_family",
    "open_source",
    "transformers_model",
]
