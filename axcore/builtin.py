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
    QuantizationSpec,
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


def _over_a_split_sequence(implementation: str, supports: str, description: str) -> KernelSpec:
    """An attention that communicates along the sequence; only a rule or a user chooses it."""
    rows = ("batch", "seq")
    return KernelSpec(
        op="attention",
        implementation=implementation,
        platforms=("*",),
        target=f"axcore.ops._attention._{implementation}:attention_{implementation}",
        supports=f"axcore.ops._context_parallel:{supports}",
        partitioning={
            "q": (*rows, "heads"),
            "k": (*rows, "kv_heads"),
            "v": (*rows, "kv_heads"),
            "q_positions": rows,
            "kv_positions": rows,
            "kv_valid": rows,
            "q_segment_ids": rows,
            "kv_segment_ids": rows,
            "prefix_lengths": ("batch",),
            "sinks": ("heads",),
        },
        communicates=("seq",),
        priority=-50,
        description=description,
    )


def _products_around_a_ring() -> Iterable[KernelSpec]:
    """Products that hide the transfers of sequence parallelism; only a rule or a user chooses."""
    inside = ("batch", "seq", "mlp", "heads", "kv_heads")
    between = ("batch", "residual_seq")
    shards = ("mlp", "heads", "kv_heads")
    for op, supports, x in (
        ("all_gather_matmul", "all_gather_supports", between),
        ("matmul_reduce_scatter", "reduce_scatter_supports", inside),
    ):
        yield KernelSpec(
            op=op,
            implementation="ring",
            platforms=("*",),
            target=f"axcore.ops._collective_ring:{op}_ring",
            supports=f"axcore.ops._ring_supports:{supports}",
            partitioning={"x": x, "weight": shards},
            communicates=("residual_seq",),
            priority=-50,
            description="transfers in steps around a ring, each behind a part of the product",
        )


@hookimpl
def axcore_kernels() -> Iterable[KernelSpec]:
    return (
        _over_a_split_sequence(
            "ring", "ring_supports", "keys travel around the devices that split the sequence"
        ),
        _over_a_split_sequence(
            "all_to_all",
            "all_to_all_supports",
            "heads are split in place of the sequence, then any other implementation",
        ),
        _xla("attention", "axcore.ops._attention._xla:attention_xla"),
        _xla("paged_attention", "axcore.ops._paged_attention:paged_attention_xla"),
        _xla("rms_norm", "axcore.ops._norms:rms_norm_xla"),
        _xla("add_rms_norm", "axcore.ops._norms:add_rms_norm_xla"),
        _xla("layer_norm", "axcore.ops._norms:layer_norm_xla"),
        _xla("rotary", "axcore.ops._rotary:rotary_xla"),
        _xla("gated_activation", "axcore.ops._activation:gated_activation_xla"),
        _xla(
            "linear_cross_entropy",
            "axcore.ops._linear_cross_entropy._xla:linear_cross_entropy_xla",
        ),
        _xla("grouped_matmul", "axcore.ops._grouped_matmul:grouped_matmul_xla"),
        _xla("all_gather_matmul", "axcore.ops._collective_matmul:all_gather_matmul_xla"),
        _xla("matmul_reduce_scatter", "axcore.ops._collective_matmul:matmul_reduce_scatter_xla"),
        *_products_around_a_ring(),
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
            "PipelinedTransformer",
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
            "quantize",
            "axcore.quantization:QuantizeModifier",
            description="a quantization recipe by name: quantize:recipe=int8",
        ),
        NamedSpec(
            "pipeline",
            "axcore.parallel:PipelineModifier",
            description="scanned layers as pipeline stages: pipeline:num_microbatches=8",
        ),
        NamedSpec(
            "sequence-parallel",
            "axcore.parallel:SequenceParallelModifier",
            description="norms and residuals split over the mesh axis model along the sequence",
        ),
        NamedSpec(
            "collective-matmul",
            "axcore.parallel:CollectiveMatmulModifier",
            description="hides the transfers of sequence-parallel behind the products beside them",
        ),
    )


def _recipe(
    name: str, target: str, dtypes: tuple[str, ...], scope: str, description: str
) -> QuantizationSpec:
    return QuantizationSpec(
        name=name,
        target=f"axcore.quantization:{target}",
        dtypes=dtypes,
        scope=scope,
        description=description,
    )


@hookimpl
def axcore_quantization() -> Iterable[QuantizationSpec]:
    training = "training: linear layers, forward and backward"
    stored, served = "serving: stored weights", "serving: stored weights and activations"
    cached = "serving: keys and values"
    float8 = ("float8_e4m3fn", "float8_e5m2")
    return (
        _recipe("none", "Unquantized", ("float32",), "training", "plain products, stated"),
        _recipe("int8", "Int8Recipe", ("int8",), training, "int8, a scale per channel"),
        _recipe("fp8", "Fp8Recipe", float8, training, "float8 scaled by the values at hand"),
        _recipe(
            "fp8-delayed",
            "DelayedFp8Recipe",
            float8,
            training,
            "float8 scaled by the largest magnitudes of earlier steps",
        ),
        _recipe(
            "mxfp8",
            "MxFp8Recipe",
            ("float8_e4m3fn",),
            training,
            "float8 in blocks of 32 with powers of two as scales",
        ),
        _recipe(
            "int4-qat",
            "Int4Recipe",
            ("int8",),
            "training: linear layers, forward",
            "weights rounded to four bits, gradients straight through",
        ),
        _recipe("int8-weights", "int8_weights", ("float32",), stored, "int8, a scale per output"),
        _recipe("int4-weights", "int4_weights", ("float32",), stored, "int4 in groups of 32"),
        _recipe("fp8-weights", "fp8_weights", ("float32",), stored, "e4m3, a scale per output"),
        _recipe("int8-serving", "int8_serving", ("int8",), served, "int8, a scale per token"),
        _recipe(
            "fp8-serving", "fp8_serving", ("float8_e4m3fn",), served, "e4m3, a scale per token"
        ),
        _recipe("int8-static", "int8_static", ("int8",), served, "int8, calibrated scales"),
        _recipe("fp8-static", "fp8_static", ("float8_e4m3fn",), served, "e4m3, calibrated scales"),
        _recipe("int8-kv", "int8_kv", ("float32",), cached, "int8, a scale per token and head"),
        _recipe("fp8-kv", "fp8_kv", ("float32",), cached, "e4m3, a scale per token and head"),
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
