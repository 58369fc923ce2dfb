"""Foreign encoders run by ``transformers``, as evidence of a conversion."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import warnings
from typing import Any

from axcore.checkpoint.convert import TensorSource
from axcore.errors import CheckpointError

__all__ = ["transformers_model"]


def transformers_model(source: TensorSource, auto_class: str) -> Any:
    """Returns a source as a torch model in float32, read without network and without foreign code.

    Args:
        source: A directory with ``config.json`` and safetensors.
        auto_class: Which of the ``Auto`` classes reads it.

    Raises:
        CheckpointError: ``transformers`` is absent or cannot run it (AX623).
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise CheckpointError(
                f"{package} is not installed",
                code="AX623",
                hint="with torch and transformers the source's own outputs are compared",
            )
    former = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch  # pyright: ignore[reportMissingImports]
            import transformers  # pyright: ignore[reportMissingImports]

            return (
                getattr(transformers, auto_class)
                .from_pretrained(
                    source.path if source.path.is_dir() else source.path.parent,
                    dtype=torch.float32,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                )
                .eval()
            )
    except Exception as error:  # whatever another library makes of the files
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"transformers cannot run it: {type(error).__name__}: {text}", code="AX623"
        ) from error
    finally:
        if former is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = former
