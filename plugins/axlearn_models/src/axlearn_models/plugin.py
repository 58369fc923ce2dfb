"""What axlearn-models contributes to axcore: experiments and converters, by name."""

from __future__ import annotations

from collections.abc import Iterable

from axcore.plugins import NamedSpec, hookimpl

# Family -> members. Member NAME is made by the function of that name (lower case, "_" for "-" and
# ".") in FAMILY/config.py.
_MEMBERS: dict[str, dict[str, str]] = {
    "fuji": {
        "fuji-7B-v1": "Llama 1 7B",
        "fuji-13B-v1": "Llama 1 13B",
        "fuji-33B-v1": "Llama 1 33B",
        "fuji-65B-v1": "Llama 1 65B",
        "fuji-test-v1": "Llama 1's structure, seconds on a laptop",
        "fuji-7B-v2": "Llama 2 7B",
        "fuji-13B-v2": "Llama 2 13B",
        "fuji-70B-v2": "Llama 2 70B",
        "fuji-test-v2": "Llama 2's structure, seconds on a laptop",
        "fuji-8B-v3": "Llama 3 8B",
        "fuji-70B-v3": "Llama 3 70B",
        "fuji-8B-v3.1": "Llama 3.1 8B",
        "fuji-70B-v3.1": "Llama 3.1 70B",
        "fuji-405B-v3": "Llama 3.1 405B",
        "fuji-1B-v3": "Llama 3.2 1B",
        "fuji-3B-v3": "Llama 3.2 3B",
        "fuji-test-v3": "Llama 3.1's structure, seconds on a laptop",
    },
    "glassllm": {
        "glassllm": "the models of the package glassllm",
    },
    "smollm2": {
        "smollm2-135M": "SmolLM2 135M",
        "smollm2-360M": "SmolLM2 360M",
        "smollm2-1.7B": "SmolLM2 1.7B",
        "smollm2-test": "SmolLM2's structure, seconds on a laptop",
    },
    "gpt2": {
        "gpt2-124M": "GPT-2 124M",
        "gpt2-355M": "GPT-2 355M",
        "gpt2-774M": "GPT-2 774M",
        "gpt2-1.5B": "GPT-2 1.5B",
        "gpt2-test": "GPT-2's structure, seconds on a laptop",
    },
    "mistral": {
        "mistral-7B-v0.1": "Mistral 7B v0.1, with a sliding window",
        "mistral-7B-v0.3": "Mistral 7B v0.3",
        "mistral-nemo-12B": "Mistral Nemo 12B",
        "mistral-test": "Mistral 7B v0.1's structure, seconds on a laptop",
    },
    "gemma2": {
        "gemma2-2B": "Gemma 2 2B",
        "gemma2-9B": "Gemma 2 9B",
        "gemma2-27B": "Gemma 2 27B",
        "gemma2-test": "Gemma 2's structure, seconds on a laptop",
    },
    "gemma3": {
        "gemma3-270M": "Gemma 3 270M",
        "gemma3-1B": "Gemma 3 1B",
        "gemma3-4B": "Gemma 3 4B's text model",
        "gemma3-12B": "Gemma 3 12B's text model",
        "gemma3-27B": "Gemma 3 27B's text model",
        "gemma3-test": "Gemma 3's structure, seconds on a laptop",
    },
    "olmo2": {
        "olmo2-1B": "OLMo 2 1B",
        "olmo2-7B": "OLMo 2 7B",
        "olmo2-13B": "OLMo 2 13B",
        "olmo2-32B": "OLMo 2 32B",
        "olmo2-test": "OLMo 2's structure, seconds on a laptop",
    },
    "phi3": {
        "phi3-mini-4k": "Phi-3-mini-4k",
        "phi3-mini-128k": "Phi-3-mini-128k",
        "phi3-medium-4k": "Phi-3-medium-4k",
        "phi3-test": "Phi-3's structure, seconds on a laptop",
    },
    "bert": {
        "bert-base": "BERT base, uncased",
        "bert-large": "BERT large, uncased",
        "bert-test": "BERT's structure, seconds on a laptop",
    },
    "minilm": {
        "minilm-L6-v2": "all-MiniLM-L6-v2, an encoder of sentences",
        "minilm-test": "MiniLM's structure, seconds on a laptop",
    },
    "t5": {
        "t5-small": "T5 small",
        "t5-base": "T5 base",
        "t5-large": "T5 large",
        "t5-3B": "T5 3B",
        "t5-11B": "T5 11B",
        "t5-test": "T5's structure, seconds on a laptop",
        "t5-v1.1-small": "T5 1.1 small, with gated networks",
        "t5-v1.1-base": "T5 1.1 base",
        "t5-v1.1-large": "T5 1.1 large",
        "t5-v1.1-xl": "T5 1.1 XL",
        "t5-v1.1-xxl": "T5 1.1 XXL",
        "t5-v1.1-test": "T5 1.1's structure, seconds on a laptop",
    },
    "vit": {
        "vit-B16": "ViT-B/16, a classifier of images",
        "vit-L16": "ViT-L/16",
        "vit-H14": "ViT-H/14",
        "vit-test": "ViT's structure, seconds on a laptop",
    },
    "afm": {
        "afm-on-device": "AFM-on-device, as far as it is published",
        "afm-server": "AFM-server's structure in a size chosen here",
        "afm-test": "AFM's structure, seconds on a laptop",
    },
    "qwen2": {
        "qwen2.5-0.5B": "Qwen2.5 0.5B",
        "qwen2.5-1.5B": "Qwen2.5 1.5B",
        "qwen2.5-3B": "Qwen2.5 3B",
        "qwen2.5-7B": "Qwen2.5 7B",
        "qwen2.5-14B": "Qwen2.5 14B",
        "qwen2.5-32B": "Qwen2.5 32B",
        "qwen2.5-72B": "Qwen2.5 72B",
        "qwen2.5-test": "Qwen2.5's structure, seconds on a laptop",
    },
    "qwen3": {
        "qwen3-0.6B": "Qwen3 0.6B",
        "qwen3-1.7B": "Qwen3 1.7B",
        "qwen3-4B": "Qwen3 4B",
        "qwen3-8B": "Qwen3 8B",
        "qwen3-14B": "Qwen3 14B",
        "qwen3-32B": "Qwen3 32B",
        "qwen3-test": "Qwen3's structure, seconds on a laptop",
    },
    # From here on: mixtures of experts, which need axlearn-moe.
    "qwen3_moe": {
        "qwen3-30B-A3B": "Qwen3 30B-A3B, 3B of its parameters for each token",
        "qwen3-235B-A22B": "Qwen3 235B-A22B",
        "qwen3-moe-test": "the structure of Qwen3's mixtures, seconds on a laptop",
    },
    "mixtral": {
        "mixtral-8x7B": "Mixtral 8x7B",
        "mixtral-8x22B": "Mixtral 8x22B",
        "mixtral-test": "Mixtral's structure, seconds on a laptop",
    },
    "olmoe": {
        "olmoe-1B-7B": "OLMoE 1B-7B",
        "olmoe-test": "OLMoE's structure, seconds on a laptop",
    },
    "qwen2_moe": {
        "qwen1.5-MoE-A2.7B": "Qwen1.5-MoE-A2.7B, with a shared expert",
        "qwen2-57B-A14B": "Qwen2-57B-A14B",
        "qwen2-moe-test": "the structure of Qwen2's mixtures, seconds on a laptop",
    },
    "gpt_oss": {
        "gpt-oss-20B": "GPT-OSS 20B",
        "gpt-oss-120B": "GPT-OSS 120B",
        "gpt-oss-test": "GPT-OSS's structure, seconds on a laptop",
    },
    "deepseek": {
        "deepseek-V2": "DeepSeek-V2",
        "deepseek-V3": "DeepSeek-V3",
        "deepseek-V3-test": "DeepSeek-V3's structure, seconds on a laptop",
    },
}

# Format and architecture of foreign files -> the class in FAMILY/convert.py that reads them.
_CONVERTERS = {
    "hf:LlamaForCausalLM": ("fuji", "HuggingFaceLlama"),
    "hf:Qwen2ForCausalLM": ("qwen2", "HuggingFaceQwen2"),
    "hf:Qwen3ForCausalLM": ("qwen3", "HuggingFaceQwen3"),
    "hf:Qwen3MoeForCausalLM": ("qwen3_moe", "HuggingFaceQwen3MoE"),
    "hf:MixtralForCausalLM": ("mixtral", "HuggingFaceMixtral"),
    "hf:OlmoeForCausalLM": ("olmoe", "HuggingFaceOlmoe"),
    "hf:Qwen2MoeForCausalLM": ("qwen2_moe", "HuggingFaceQwen2MoE"),
    "hf:GptOssForCausalLM": ("gpt_oss", "HuggingFaceGptOss"),
    "hf:DeepseekV2ForCausalLM": ("deepseek", "HuggingFaceDeepseekV2"),
    "hf:DeepseekV3ForCausalLM": ("deepseek", "HuggingFaceDeepseekV3"),
    "hf:GPT2LMHeadModel": ("gpt2", "HuggingFaceGPT2"),
    "hf:Gemma2ForCausalLM": ("gemma2", "HuggingFaceGemma2"),
    "hf:Gemma3ForCausalLM": ("gemma3", "HuggingFaceGemma3"),
    "hf:Gemma3ForConditionalGeneration": ("gemma3", "HuggingFaceGemma3WithImages"),
    "hf:MistralForCausalLM": ("mistral", "HuggingFaceMistral"),
    "hf:Olmo2ForCausalLM": ("olmo2", "HuggingFaceOlmo2"),
    "hf:Phi3ForCausalLM": ("phi3", "HuggingFacePhi3"),
    "hf:BertModel": ("bert", "HuggingFaceBert"),
    "hf:BertForMaskedLM": ("bert", "HuggingFaceBertMaskedLM"),
    "hf:T5ForConditionalGeneration": ("t5", "HuggingFaceT5"),
    "hf:ViTForImageClassification": ("vit", "HuggingFaceViT"),
    "gguf:llama": ("fuji", "GGUFLlama"),
    "npz:glassllm": ("glassllm", "GlassLM"),
}


@hookimpl
def axcore_experiments() -> Iterable[NamedSpec]:
    """The members of all families."""
    return tuple(
        NamedSpec(name, f"axlearn_models.{family}.config:{_function(name)}", description=text)
        for family, members in _MEMBERS.items()
        for name, text in members.items()
    )


@hookimpl
def axcore_converters() -> Iterable[NamedSpec]:
    """The published weights that can be read, and most of them written."""
    return tuple(
        NamedSpec(name, f"axlearn_models.{family}.convert:{cls}")
        for name, (family, cls) in _CONVERTERS.items()
    )


def _function(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")
