"""Rotary settings as Hugging Face's ``config.json`` writes them, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axcore.errors import ConfigError, did_you_mean
from axlearn_rope._axes import MultiAxis
from axlearn_rope._rope import RoPE
from axlearn_rope._scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    RoPEScaling,
    YaRNScaling,
)

__all__ = ["rope_from_hf", "rope_to_hf"]

_ORIGINAL = "original_max_position_embeddings"
# What every kind of scaling may hold beside its own keys.
_COMMON = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("mrope_section", "mrope_interleaved"),
}
# rope_type -> its own keys.
_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor", _ORIGINAL},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": {
        *("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
        *("truncate", _ORIGINAL),
    },
    "longrope": {"short_factor", "long_factor", "factor", "attention_factor", _ORIGINAL},
}
_ALIASES = {"su": "longrope", "mrope": "default"}


def rope_from_hf(config: Mapping[str, Any], *, layer_type: str | None = None) -> RoPE.Config:
    """Returns the RoPE of a Hugging Face ``config.json``.

    Reads ``rope_parameters`` (transformers 5) or ``rope_theta``, ``rope_scaling`` and
    ``partial_rotary_factor`` (before), and where a scheme needs them
    ``max_position_embeddings`` and ``original_max_position_embeddings``.

    Args:
        config: The parsed file.
        layer_type: Which entry counts where ``rope_parameters`` holds one for each kind of layer,
            such as ``"full_attention"``.

    Raises:
        ConfigError: A kind of scaling or a setting that is not known, or a missing one.
    """
    found: Any = config.get("rope_parameters") or {}
    if layer_type is not None:
        if layer_type not in found:
            raise ConfigError(
                f"rope_parameters has no {layer_type!r}; it has {sorted(found)}", code="AX386"
            )
        found = found[layer_type]
    parameters = {**found, **(config.get("rope_scaling") or {})}
    parameters = {k: v for k, v in parameters.items() if v is not None}
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    kind = _ALIASES.get(kind, kind)
    if kind not in _KEYS:
        raise ConfigError(
            f"rope_type {kind!r} is not known; known: {', '.join(_KEYS)}",
            code="AX386",
            hint=did_you_mean(kind, _KEYS),
        )
    unknown = sorted(set(parameters) - _KEYS[kind] - _COMMON)
    if unknown:
        raise ConfigError(
            f"rope_type {kind!r} does not read {', '.join(unknown)}",
            code="AX386",
            hint=f"it reads {', '.join(sorted(_KEYS[kind]))}" if _KEYS[kind] else None,
        )

    def either(name: str, default: float) -> float:
        return float(parameters.get(name, config.get(name, default)))

    rope = RoPE.Config(
        base=either("rope_theta", 10_000.0),
        rotary_fraction=either("partial_rotary_factor", 1.0),
        scaling=_scaling(kind, parameters, config),
    )
    if "mrope_section" in parameters:
        layout = "interleaved" if parameters.get("mrope_interleaved") else "blocks"
        rope.axes = MultiAxis(tuple(parameters["mrope_section"]), layout)
    return rope


def _scaling(
    kind: str, parameters: Mapping[str, Any], config: Mapping[str, Any]
) -> RoPEScaling | None:
    def need(name: str, *places: Mapping[str, Any]) -> Any:
        for place in places or (parameters,):
            if place.get(name) is not None:
                return place[name]
        raise ConfigError(f"rope_type {kind!r} needs {name}, which is missing", code="AX386")

    def given(*names: str) -> dict[str, Any]:
        return {name: parameters[name] for name in names if name in parameters}

    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(need("factor"))
    if kind == "dynamic":  # its trained length is the model's, whatever else is written there
        return DynamicNTKScaling(need("factor"), need("max_position_embeddings", config))
    original = need(
        _ORIGINAL, parameters, config, {_ORIGINAL: config.get("max_position_embeddings")}
    )
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        values = {name: need(name) for name in names}
        return Llama3Scaling(**values, original_max_seq_len=original)
    factor = parameters.get("factor")
    if factor is None:
        factor = need("max_position_embeddings", config) / original
    if kind == "yarn":
        names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
        return YaRNScaling(factor, original, **given(*names, "truncate"))
    return LongRoPEScaling(
        short_factor=tuple(need("short_factor")),
        long_factor=tuple(need("long_factor")),
        factor=max(1.0, factor),
        original_max_seq_len=original,
        **given("attention_factor"),
    )


def rope_to_hf(rope: RoPE.Config) -> dict[str, Any]:
    """Returns the entries of a Hugging Face ``config.json`` that say what ``rope`` does.

    ``rope_theta`` and, where they apply, ``rope_scaling`` and ``partial_rotary_factor``; all
    versions of transformers read them. ``pairing`` is a matter of the weights' order there and
    leaves no trace.

    Raises:
        ConfigError: A scheme that Hugging Face has no name for.
    """
    out: dict[str, Any] = {"rope_theta": rope.base}
    if rope.rotary_fraction != 1:
        out["partial_rotary_factor"] = rope.rotary_fraction
    scaling: dict[str, Any] | None = _scaling_to_hf(rope.scaling)
    if rope.axes is not None:
        scaling = dict[str, Any](scaling or {"rope_type": "default"})
        scaling["mrope_section"] = list(rope.axes.sections)
        if rope.axes.layout == "interleaved":
            scaling["mrope_interleaved"] = True
    if scaling is not None:
        out["rope_scaling"] = scaling
    return out


def _scaling_to_hf(scaling: RoPEScaling | None) -> dict[str, Any] | None:
    match scaling:
        case None:
            return None
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case DynamicNTKScaling(seq_len=None):
            # The trained length is the file's max_position_embeddings.
            return {"rope_type": "dynamic", "factor": scaling.factor}
        case Llama3Scaling():
            out: dict[str, Any] = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
            }
        case YaRNScaling():
            names = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            names = (*names, "attention_factor")
            values = {name: getattr(scaling, name) for name in names}
            out = {"rope_type": "yarn", **{k: v for k, v in values.items() if v is not None}}
            if not scaling.truncate:
                out["truncate"] = False
        case LongRoPEScaling():
            out = {
                "rope_type": "longrope",
                "short_factor": list(scaling.short_factor),
                "long_factor": list(scaling.long_factor),
                "factor": scaling.factor,
            }
            if scaling.attention_factor is not None:
                out["attention_factor"] = scaling.attention_factor
        case _:
            raise ConfigError(
                f"Hugging Face has no name for {scaling!r}",
                code="AX386",
                hint="it knows linear, dynamic (by the length at hand), llama3, yarn and longrope",
            )
    out[_ORIGINAL] = scaling.original_max_seq_len
    return out
