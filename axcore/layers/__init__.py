"""Layers: modules with parameters and a precision, and the roles they play.

Replaceable slots are annotated with a role (``BaseFeedForward``, ``BaseAttention``, ...), so any
package's layer fits without an edit here.
"""

from axcore.layers.attention import Attention
from axcore.layers.attention_bias import ALiBi, RelativePositionBias, RelativePositionTable
from axcore.layers.base import Layer
from axcore.layers.causal_lm import CausalLM
from axcore.layers.collective import CollectiveDot
from axcore.layers.cross_attention import CrossAttention
from axcore.layers.decoder import Decoder, Encoder
from axcore.layers.dropout import Dropout
from axcore.layers.embedding import Embedding, LearnedPositions, LMHead
from axcore.layers.encoder_decoder import EncoderDecoder
from axcore.layers.encoder_model import EncoderModel, HeadTransform
from axcore.layers.feed_forward import FeedForward
from axcore.layers.initializers import Constant, Normal, Ones, VarianceScaling, Zeros
from axcore.layers.kv_cache import ContiguousKVCache, init_cache, merge_state
from axcore.layers.linear import Linear
from axcore.layers.lora import DoRA, LoRA, LowRankAdapter
from axcore.layers.multi_token import MultiTokenPrediction
from axcore.layers.norm import LayerNorm, RMSNorm
from axcore.layers.pipeline import PipelinedTransformer
from axcore.layers.pooling import FirstTokenPooler, MeanPooler
from axcore.layers.qkv import QKV, FusedQKV
from axcore.layers.query_key import QKNorm, QueryKeyChain
from axcore.layers.roles import (
    BaseAttention,
    BaseAttentionBias,
    BaseDecoder,
    BaseDropout,
    BaseEmbedding,
    BaseFeedForward,
    BaseGroupedLinear,
    BaseHead,
    BaseKVCache,
    BaseMultiToken,
    BaseNorm,
    BasePooler,
    BasePosition,
    BaseQKV,
    BaseQueryKeyTransform,
    BaseSharedValues,
    BaseTransformerLayer,
    SequenceInfo,
)
from axcore.layers.stack import BaseStack, RepeatedTransformer, StackedTransformer
from axcore.layers.transformer import (
    CrossTransformerLayer,
    ParallelTransformerLayer,
    PostNormTransformerLayer,
    TransformerLayer,
)
from axcore.layers.vision import PatchEmbedding, VisionTransformer

__all__ = [
    "QKV",
    "ALiBi",
    "Attention",
    "BaseAttention",
    "BaseAttentionBias",
    "BaseDecoder",
    "BaseDropout",
    "BaseEmbedding",
    "BaseFeedForward",
    "BaseGroupedLinear",
    "BaseHead",
    "BaseKVCache",
    "BaseMultiToken",
    "BaseNorm",
    "BasePooler",
    "BasePosition",
    "BaseQKV",
    "BaseQueryKeyTransform",
    "BaseSharedValues",
    "BaseStack",
    "BaseTransformerLayer",
    "CausalLM",
    "CollectiveDot",
    "Constant",
    "ContiguousKVCache",
    "CrossAttention",
    "CrossTransformerLayer",
    "Decoder",
    "DoRA",
    "Dropout",
    "Embedding",
    "Encoder",
    "EncoderDecoder",
    "EncoderModel",
    "FeedForward",
    "FirstTokenPooler",
    "FusedQKV",
    "HeadTransform",
    "LMHead",
    "Layer",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "LoRA",
    "LowRankAdapter",
    "MeanPooler",
    "MultiTokenPrediction",
    "Normal",
    "Ones",
    "ParallelTransformerLayer",
    "PatchEmbedding",
    "PipelinedTransformer",
    "PostNormTransformerLayer",
    "QKNorm",
    "QueryKeyChain",
    "RMSNorm",
    "RelativePositionBias",
    "RelativePositionTable",
    "RepeatedTransformer",
    "SequenceInfo",
    "StackedTransformer",
    "TransformerLayer",
    "VarianceScaling",
    "VisionTransformer",
    "Zeros",
    "init_cache",
    "merge_state",
]
