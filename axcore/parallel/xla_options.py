"""Compiler options: their text form, and what of them a platform's compiler takes.

A name is asked of the parsers themselves, in a process of its own, so that nothing of JAX has been
started here when an option is refused: first the parser of the installed jaxlib, whose options are
one list for all its backends; then, for what that does not know, the platform's own compiler where
a plugin provides one and its package is there. Without one, a name of the platform's form
(``xla_PLATFORM_...``) or in its plugin's list is left for the machine to judge. Options that the
instance's own plugins state as they are need no asking.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from axcore.errors import AotError, AxcoreError, ConfigError, did_you_mean
from axcore.parallel.instances import resolve_instance
from axcore.plugins import Instance, host

__all__ = ["check_compiler_options", "explain_refusal", "parse_xla", "platform_options"]

Option = bool | int | float | str

_log = logging.getLogger("axcore.parallel")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
_BAD_VALUE = re.compile(r"While setting option ([A-Za-z0-9_]+), (.*)")
# Platforms of JAX itself; plugins' come from their instance types.
_PLATFORMS = frozenset({"cpu", "gpu", "tpu"})
_IN_JAXLIB = frozenset({"cpu", "gpu"})  # whose options jaxlib's own parser knows, all of them
_ALIASES = {"cuda": "gpu", "rocm": "gpu"}  # whose options are called xla_gpu_...
_SECONDS = 120  # of asking, on a busy machine
_STOP = "xla_stops_here"  # no option: refused after the one that is asked about was taken


def parse_xla(text: str) -> tuple[str, Option]:
    """Reads ``key=value``: true and false, whole numbers, numbers, else text.

    Args:
        text: Such as ``"xla_cpu_enable_fast_math=true"``.

    Raises:
        ConfigError: It is not of this form.
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not _NAME.fullmatch(key):
        dashes = "leave out the leading dashes; " if key.startswith("-") else ""
        raise ConfigError(
            f"--xla got {text!r}, expected key=value",
            code="AX497",
            hint=f"{dashes}for example --xla xla_cpu_enable_fast_math=true",
        )
    if value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    for kind in (int, float):
        try:
            number = kind(value)
        except ValueError:
            continue
        if math.isfinite(number):
            return key, number
    return key, value


def platform_options(options: Mapping[str, Option], platform: str) -> dict[str, Option]:
    """Returns the options without those that only another platform's compiler reads.

    A config may state options of several platforms; each compiler gets its own.

    Args:
        options: Option -> value.
        platform: JAX platform of the target.
    """
    return {key: value for key, value in options.items() if _foreign(key, platform) is None}


def check_compiler_options(
    options: Mapping[str, Option],
    instance: Instance,
    *,
    vouched: Mapping[str, Option] | None = None,
    flags: Iterable[str] = (),
) -> None:
    """Refuses options that the instance's compiler does not know, before JAX starts anything.

    Args:
        options: Option -> value.
        instance: The machine.
        vouched: Options as the instance's own plugins state them.
        flags: Names that the user has given for this very instance.

    Raises:
        ConfigError: An unknown option (AX494), a value that it does not take (AX495), or a flag
            of another platform (AX496).
    """
    vouched, flags = vouched or {}, frozenset(flags)
    for key in options:
        other = _foreign(key, instance.platform)
        if other is not None and key in flags:
            raise ConfigError(
                f"compiler option {key!r} is one of platform {other!r}; {instance.name!r} is "
                f"{instance.platform!r}, whose compiler would ignore it",
                code="AX496",
                where="--xla",
                hint=f"leave it out, or give it with an instance of {other!r}",
            )
    asked = {
        key: value
        for key, value in platform_options(options, instance.platform).items()
        if key not in vouched or (type(value), value) != (type(vouched[key]), vouched[key])
    }
    if not asked:
        return
    answer = _ask(instance.name, json.dumps(asked, sort_keys=True))
    for key, refusal in answer["refused"].items():
        where = "--xla" if key in flags else f"compiler_options.{key}"
        if refusal is not None:
            raise _bad_value(key, asked[key], refusal, where)
        own = f"xla_{_ALIASES.get(instance.platform, instance.platform)}_"
        if not answer["certain"] and (key in vouched or key.startswith(own)):
            _log.info("only the compiler on the machine knows whether there is an option %r", key)
            continue
        near = [n for n in answer["names"] if _foreign(n, instance.platform) is None]
        raise _unknown(key, instance.platform, where, (*vouched, *near))


def explain_refusal(error: BaseException, options: Mapping[str, Option]) -> ConfigError | None:
    """Returns what a compiler's refusal of an option means; None for any other error.

    Args:
        error: What compiling raised.
        options: The options of the compilation.
    """
    text = str(error)
    if (found := _UNKNOWN.search(text)) is not None:
        key = found[1]
        return _unknown(key, None, f"compiler_options.{key}", [k for k in options if k != key])
    if (found := _BAD_VALUE.search(text)) is not None and found[1] in options:
        return _bad_value(found[1], options[found[1]], found[2], f"compiler_options.{found[1]}")
    return None


def _foreign(key: str, platform: str) -> str | None:
    """Returns the other platform whose option this is by its name, or None."""
    mine = _ALIASES.get(platform, platform)
    of_plugins = {_ALIASES.get(s.platform, s.platform) for s in host().instance_types.specs()}
    for other in _PLATFORMS | of_plugins:
        if other != mine and key.startswith(f"xla_{other}_"):
            return other
    return None


def _unknown(key: str, platform: str | None, where: str, names: Iterable[str]) -> ConfigError:
    near = did_you_mean(key, sorted(set(names)))
    of = "" if platform is None else f" of platform {platform!r}"
    return ConfigError(
        f"the compiler{of} knows no option {key!r}",
        code="AX494",
        where=where,
        hint=near or "leave it out, or look it up for the installed version of the compiler",
    )


def _bad_value(key: str, value: Option, reason: str, where: str) -> ConfigError:
    return ConfigError(
        f"compiler option {key!r} does not take {value!r}: {reason.rstrip('.')}",
        code="AX495",
        where=where,
    )


# -- asking, in another process -------------------------------------------------------------


@functools.cache
def _ask(instance: str, options: str) -> dict[str, Any]:
    """Returns what the parsers refuse; see :func:`_answer`. Nothing when they cannot be asked."""
    code = f"from {__name__} import _answer; _answer({instance!r})"
    # Asking must not touch an accelerator, nor be stopped by flags meant for this process.
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=options,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env=env,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        # Compiling the program asks again.
        _log.debug("compiler options are checked when the program is compiled: %s", error)
        return {"refused": {}, "certain": False, "names": []}


def _answer(instance_name: str) -> None:
    """Reads options from stdin and writes which are refused; the child's main function.

    ``refused`` maps a name to the reason against its value, or to None when it is unknown;
    ``certain`` says whether the instance's own compiler was asked; ``names`` are known names.
    """
    options: dict[str, Option] = json.loads(sys.stdin.read())
    lowered = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32"))
    refused, certain = _refused(lowered, options), True
    unknown = [key for key, reason in refused.items() if reason is None]
    names: list[str] = []
    if unknown:
        names = sorted(_names_in_jaxlib())
        try:
            own = _lowered_for(resolve_instance(instance_name))
        except AxcoreError:
            certain = False
        else:
            if own is not None:
                again = _refused(own, {key: options[key] for key in unknown})
                for key in unknown:
                    refused.pop(key)
                refused |= again
    sys.stdout.write(json.dumps({"refused": refused, "certain": certain, "names": names}) + "\n")


def _refused(lowered: Any, options: Mapping[str, Option]) -> dict[str, str | None]:
    refused: dict[str, str | None] = {}
    for key, value in options.items():
        try:
            # Options are read in order, so nothing is ever compiled.
            lowered.compile(compiler_options={key: value, _STOP: True})
        except jax.errors.JaxRuntimeError as error:
            text = str(error)
            if (found := _UNKNOWN.search(text)) is not None:
                if found[1] == key:
                    refused[key] = None
            else:
                found = _BAD_VALUE.search(text)
                refused[key] = found[2] if found is not None else text.splitlines()[0]
    return refused


def _lowered_for(instance: Instance) -> Any:
    """Returns a program for the instance's compiler; None when jaxlib's answer is that one's.

    Raises:
        AotError: No compiler is to be had here.
    """
    from axcore.parallel.aot import compiler_for  # whose own compiling explains refusals

    if _ALIASES.get(instance.platform, instance.platform) in _IN_JAXLIB:
        return None
    compiler = compiler_for(instance)
    if not compiler.compiles:
        raise AotError(f"no compiler for {instance.platform!r} without the machine")
    compiler.prepare()
    device = next(iter(compiler.devices(instance)))
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32", sharding=sharding))


def _names_in_jaxlib() -> set[str]:
    """Returns names that look like options in the installed jaxlib, for "did you mean" only."""
    import jaxlib

    names: set[str] = set()
    for library in Path(jaxlib.__file__).parent.rglob("*.so"):
        with library.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                continue
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                found = re.findall(rb"\0(xla_[a-z0-9_]{3,80})\0", content)
        names |= {name.decode() for name in found}
    return names
