"""Several real processes as one distributed JAX program, on simulated devices."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from typing import Any

__all__ = ["run_processes"]

_DRIVER = "from axcore.testing._processes import _drive; _drive()"
_PROLOGUE = """
import sys
import jax as _jax
from axcore.parallel import prepare_host as _prepare, resolve_instance as _resolve
process, _port, _count, _instance, *args = sys.argv[1:]
process = int(process)
_prepare(_resolve(_instance), num_processes=int(_count))
_jax.distributed.initialize(f"127.0.0.1:{_port}", int(_count), process)
"""
_EPILOGUE = """
_jax.distributed.shutdown()
"""


def run_processes(
    program: str,
    *args: str,
    num_processes: int,
    instance: str,
    timeout_seconds: float = 200,
) -> list[Any]:
    """Runs a program in several processes of one JAX job; returns what each printed.

    They run in a network of their own where the system allows it: packets of the usual loopback,
    64 KiB, wait for acknowledgements; with smaller ones a collective takes milliseconds instead of
    seconds.

    Args:
        program: Python source. It finds ``process``, its number, and ``args``; JAX is initialized.
            The last line that it prints is JSON.
        args: Strings for the program.
        num_processes: Processes, which share the devices equally.
        instance: Simulated devices in all, such as ``cpu-8``.
        timeout_seconds: Time for all of it.

    Returns:
        The printed values, process by process.

    Raises:
        AssertionError: A process failed; the message has what it wrote to stderr.
    """
    request = {
        "program": _PROLOGUE + program + _EPILOGUE,
        "args": [str(num_processes), instance, *map(str, args)],
        "num_processes": num_processes,
        "timeout_seconds": timeout_seconds,
    }
    command = [sys.executable, "-c", _DRIVER]
    alone = ["unshare", "-n", "--"]
    if shutil.which("ip") and subprocess.run([*alone, "true"], capture_output=True).returncode == 0:
        network = 'ip link set lo up && ip link set lo mtu 1500 && exec "$0" "$@"'
        command = [*alone, "sh", "-c", network, *command]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _drive() -> None:
    """Starts the processes that stdin asks for; prints a list of what each printed last."""
    request = json.load(sys.stdin)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", request["program"], str(i), port, *request["args"]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(request["num_processes"])
    ]
    try:
        outputs = [p.communicate(timeout=request["timeout_seconds"]) for p in started]
    except subprocess.TimeoutExpired:
        for p in started:
            p.kill()
        said = "\n".join(f"process {i}:\n{p.communicate()[1]}" for i, p in enumerate(started))
        sys.exit(f"not finished after {request['timeout_seconds']} s\n{said}")
    finally:
        for p in started:
            p.kill()
    for i, (p, (_, errors)) in enumerate(zip(started, outputs, strict=True)):
        if p.returncode:
            sys.exit(f"process {i} ended with exit code {p.returncode}:\n{errors}")
    json.dump([json.loads(out.splitlines()[-1]) for out, _ in outputs], sys.stdout)
