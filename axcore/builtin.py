"""What core itself provides, registered the way any plugin registers: names and strings only."""

from __future__ import annotations

from collections.abc import Iterable

from axcore.plugins.hookspecs import hookimpl
from axcore.plugins.specs import (
    CompilerSpec,
    InstanceTypeSpec,
    KernelSpec,
    LayerSpec,
    MeshRuleSpec,
    NamedSpec,
)

__all__: list[str] = []


def _xla(op: str, target: str) -> KernelSpec:
    """The pure-XLA reference of an op: runs everywhere, and is the last to be preferred."""
    return KernelSpec(
        op=op,
        implementation="xla",
        platforms=("*",),
        target=target,
        priority=-100,
        description="pure XLA reference",
    )


@hookimpl
def axcore_kernels() -> Iterable[KernelSpec]:
    return (
        _xla("attention", "axcore.ops._attention._xla:attention_xla"),
        _xla("rms_norm", "axcore.ops._norms:rms_norm_xla"),
        _xla("layer_norm", "axcore.ops._norms:layer_norm_xla"),
        _xla("gated_activation", "axcore.ops._activation:gated_activation_xla"),
        _xla(
            "linear_cross_entropy",
            "axcore.ops._linear_cross_entropy._xla:linear_cross_entropy_xla",
        ),
        _xla("grouped_matmul", "axcore.ops._grouped_matmul:grouped_matmul_xla"),
    )


@hookimpl
def axcore_instance_types() -> Iterable[InstanceTypeSpec]:
    return (
        InstanceTypeSpec(
            pattern="cpu",
            family="cpu",
            platform="cpu",
            target="axcore.parallel.instances:resolve_cpu",
            description="this machine's CPU, one device",
        ),
        InstanceTypeSpec(
            pattern="cpu-*",
            family="cpu",
            platform="cpu",
            target="axcore.parallel.instances:resolve_cpu",
            description="simulated devices on this machine's CPU: cpu-8 has eight",
        ),
    )


@hookimpl
def axcore_compilers() -> Iterable[CompilerSpec]:
    return (
        CompilerSpec(
            platform="cpu",
            target="axcore.parallel.aot._cpu:CpuCompiler",
            description="XLA for this machine's CPU, on simulated devices",
        ),
    )


@hookimpl
def axcore_mesh_rules() -> Iterable[MeshRuleSpec]:
    return (
        MeshRuleSpec(
            name="cpu",
            pattern="cpu",
            target="axcore.parallel.cpu:CPU",
            reason="one device: nothing to shard",
        ),
        MeshRuleSpec(
            name="cpu-simulated",
            pattern="cpu-*",
            target="axcore.parallel.cpu:CPU_SIMULATED",
            reason="simulated devices are for checking shardings: shard parameters over all",
        ),
    )


@hookimpl
def axcore_layers() -> Iterable[LayerSpec]:
    return tuple(
        LayerSpec(name=name, target=f"axcore.layers:{name}")
        for name in (
            "Linear",
            "Embedding",
            "LMHead",
            "LearnedPositions",
            "RMSNorm",
            "LayerNorm",
            "Dropout",
            "Attention",
            "CrossAttention",
            "QKV",
            "FusedQKV",
            "QKNorm",
            "QueryKeyChain",
            "ALiBi",
            "RelativePositionBias",
            "RelativePositionTable",
            "ContiguousKVCache",
            "FeedForward",
            "TransformerLayer",
            "PostNormTransformerLayer",
            "ParallelTransformerLayer",
            "CrossTransformerLayer",
            "StackedTransformer",
            "RepeatedTransformer",
            "Decoder",
            "Encoder",
            "FirstTokenPooler",
            "MeanPooler",
            "MultiTokenPrediction",
            "PatchEmbedding",
            "CausalLM",
            "EncoderModel",
            "EncoderDecoder",
            "VisionTransformer",
        )
    )


@hookimpl
def axcore_modifiers() -> Iterable[NamedSpec]:
    return (
        NamedSpec(
            "lora",
            "axcore.peft:LoRAModifier",
            description="low-rank adapters in linear layers, everything else frozen",
        ),
        NamedSpec(
            "dora",
            "axcore.peft:DoRAModifier",
            description="as lora, with a trained magnitude for each output",
        ),
        NamedSpec(
            "freeze",
            "axcore.peft:FreezeModifier",
            description="train the parameters that train=... names and no others",
        ),
        NamedSpec(
            "sequence-parallel",
            "axcore.parallel:SequenceParallelModifier",
            description="norms and residuals split over the mesh axis model along the sequence",
        ),
    )


@hookimpl
def axcore_experiments() -> Iterable[NamedSpec]:
    return (
        NamedSpec(
            "tiny-lm",
            "axcore.experiments:tiny_lm",
            description="byte-level language model of 0.12M parameters; a minute on a laptop",
        ),
    )


@hookimpl
def axcore_optimizers() -> Iterable[NamedSpec]:
    return (
        NamedSpec("adamw", "axcore.train.optimizers:adamw"),
        NamedSpec("adafactor", "axcore.train.optimizers:adafactor"),
        NamedSpec("lion", "axcore.train.optimizers:lion"),
        NamedSpec("sgd", "axcore.train.optimizers:sgd"),
        NamedSpec("muon", "axcore.train.optimizers:muon"),
    )


@hookimpl
def axcore_sources() -> Iterable[NamedSpec]:
    return (
        NamedSpec("text", "axcore.data:TextFiles"),
        NamedSpec("jsonl", "axcore.data:JsonLines"),
        NamedSpec("parquet", "axcore.data:Parquet"),
        NamedSpec("python-reference", "axcore.data:PythonReference"),
        NamedSpec("mixture", "axcore.data:Mixture"),
        NamedSpec("grain", "axcore.data:GrainDataset"),
    )


@hookimpl
def axcore_tokenizers() -> Iterable[NamedSpec]:
    return (
        NamedSpec("byte", "axcore.data:ByteTokenizer"),
        NamedSpec("hf", "axcore.data:HFTokenizer"),
        NamedSpec("sentencepiece", "axcore.data:SentencePieceTokenizer"),
        NamedSpec("tiktoken", "axcore.data:TiktokenTokenizer"),
        NamedSpec("gguf", "axcore.data:GGUFTokenizer"),
    )


@hookimpl
def axcore_writers() -> Iterable[NamedSpec]:
    return (
        NamedSpec("jsonl", "axcore.train:JsonlWriter"),
        NamedSpec("tensorboard", "axcore.train:TensorBoardWriter"),
        NamedSpec("console", "axcore.train:ConsoleWriter"),
    )


@hookimpl
def axcore_checkpointers() -> Iterable[NamedSpec]:
    return (NamedSpec("orbax", "axcore.checkpoint:OrbaxCheckpointer"),)
