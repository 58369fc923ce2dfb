"""The program: help, unknown names, JSON, errors, plugin commands."""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
import warnings

import pytest

from axcore.cli._console import console
from axcore.cli._failures import Failure
from axcore.cli._main import COMMANDS
from axcore.cli._parser import Parser
from axcore.config import ConfigWarning
from axcore.errors import ConfigError
from axcore.plugins import Candidate, PluginHost, reset_host

LEAVES = [
    "train",
    "eval",
    "generate",
    "tokenizer train",
    "tokenizer show",
    "tokenizer encode",
    "tokenizer decode",
    "config show",
    "config diff",
    "config explain",
    "config golden",
    "plugins list",
    "plugins show",
    "plugins check",
    "plugins new",
    "doctor",
]


def test_help_names_all_commands_and_imports_neither_jax_nor_rich_nor_plugins():
    code = (
        "import sys\nfrom axcore.cli import main\nassert main(['--help']) == 0\n"
        "heavy = {'jax', 'rich', 'numpy', 'pluggy', 'axcore.plugins', 'axcore.config'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    for name in COMMANDS:
        assert f"    {name} " in done.stdout


def test_the_module_runs_the_program():
    done = subprocess.run(
        [sys.executable, "-m", "axcore", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "axcore")


@pytest.mark.parametrize("command", LEAVES)
def test_help_has_an_example_and_the_shared_flags(cli, command):
    done = cli(*command.split(), "--help")
    assert done.code == 0
    assert f"axcore {command} " in done.out.split("example")[1]
    for flag in ("--json", "--debug", "--no-plugins", "--trust"):
        assert flag in done.out


def test_without_a_command_the_error_says_how_to_get_help(cli):
    done = cli()
    assert done.code == 2
    assert done.err.startswith("error: ") and "axcore --help" in done.err


def test_an_unknown_command_gets_near_misses(cli):
    done = cli("trian", "tiny-lm")
    assert done.code == 2
    assert "no command 'trian'" in done.err and "did you mean 'train'?" in done.err


def test_a_command_that_no_installed_plugin_adds_points_at_plugins(cli):
    former = reset_host(PluginHost([]))
    try:
        done = cli("upcycle", "--from", "run")
    finally:
        reset_host(former)
    assert done.code == 2 and "no command 'upcycle'" in done.err
    assert "axcore plugins list" in done.err


def test_an_unknown_inner_command_gets_near_misses(cli):
    done = cli("plugins", "lst")
    assert done.code == 2 and "did you mean 'list'?" in done.err


def test_an_unknown_flag_gets_near_misses(cli):
    done = cli("train", "tiny-lm", "--out", "x", "--max-stp", "3")
    assert done.code == 2 and "did you mean '--max-step'?" in done.err


def test_a_misspelt_flag_that_was_required_gets_near_misses(cli):
    done = cli("generate", "--form", "x", "--prompt", "a", "--max-tokens", "2")
    assert done.code == 2 and "did you mean '--from'?" in done.err


def test_flags_are_never_abbreviated(cli):
    assert cli("train", "tiny-lm", "--out", "x", "--max", "3").code == 2


def test_an_error_is_one_line_and_a_hint(cli):
    lines = cli("config", "show", "tiny-ln").err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]
    assert lines[0].endswith("[AX801]")


def test_with_json_an_error_is_the_one_document_on_stdout(cli):
    done = cli("config", "show", "tiny-ln", "--json")
    error = done.json["error"]
    assert error["code"] == "AX801" and error["exit_code"] == done.code == 2
    assert "tiny-lm" in error["hint"]
    assert "error: " in done.err


def test_with_json_a_usage_error_is_a_document_too(cli):
    assert cli("train", "--json").json["error"]["code"] == "AX800"


def test_with_json_what_user_code_prints_goes_to_stderr(cli, module):
    name = module(
        "chatty",
        "from axcore import experiments\n"
        "print('at import')\n"
        "def exp():\n    print('hello')\n    return experiments.get('tiny-lm')\n",
    )
    done = cli("config", "show", f"{name}:exp", "--json")
    assert set(done.json) == {"fields"}
    assert "at import" in done.err and "hello" in done.err


def test_an_exception_in_user_code_names_its_line_and_exits_4(cli, module):
    name = module("raising", "def exp():\n    raise ZeroDivisionError('so it goes')\n")
    done = cli("config", "show", f"{name}:exp")
    assert done.code == 4
    assert "raising.py:2: ZeroDivisionError: so it goes" in done.err
    assert "internal" not in done.err and "Traceback" not in done.err


@pytest.mark.parametrize(("given", "code"), [("", 4), ("0", 4), ("'bye'", 4), ("7", 7)])
def test_user_code_that_exits_is_a_failure_that_names_its_line(cli, module, given, code):
    name = module(f"exits_{code}_{len(given)}", f"def exp():\n    raise SystemExit({given})\n")
    done = cli("config", "show", f"{name}:exp")
    assert done.code == code
    assert f"{name}.py:2: " in done.err and "[AX894]" in done.err


def test_debug_shows_the_traceback(cli, module):
    name = module("raising2", "def exp():\n    raise ZeroDivisionError('so it goes')\n")
    done = cli("config", "show", f"{name}:exp", "--debug")
    assert done.code == 4 and "Traceback" in done.err and "error: " in done.err


def test_an_exception_of_our_own_is_internal_and_exits_4(cli, monkeypatch):
    monkeypatch.setattr("axcore.experiments._checked", 5)
    done = cli("config", "show", "tiny-lm")
    assert done.code == 4
    assert "error: internal error: TypeError" in done.err and "--debug" in done.err


def test_an_interrupt_exits_130_without_a_traceback(cli, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("axcore.experiments.get", interrupt)
    done = cli("config", "show", "tiny-lm")
    assert done.code == 130 and done.err == "error: interrupted [AX890]\n"


def test_a_reader_that_closes_the_pipe_gets_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m axcore config show tiny-lm --json | head -c 1; "
        "echo ${PIPESTATUS[0]} >&2",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
    )
    assert done.stdout == "{"
    # An accelerator's plugin may say on stderr that it found none.
    assert "Traceback" not in done.stderr and done.stderr.split()[-1] == "0"


# Plugin commands ----------------------------------------------------------------------------


@pytest.fixture
def plugin_host(module):
    """Makes the process's host one of the given plugin sources."""

    def make(**sources: str) -> None:
        def candidate(name: str) -> Candidate:
            written = module(f"cmdplugin_{name}", f"from axcore.plugins import *\n{sources[name]}")
            return Candidate(name, "1.0", name, lambda: __import__(written))

        reset_host(PluginHost([candidate(name) for name in sources]))

    former = reset_host()
    yield make
    reset_host(former)


GREET = (
    "@hookimpl\ndef axcore_commands():\n    return [NamedSpec('greet', 'greet_command:add_parser')]"
)
GREET_COMMAND = """
from axcore.cli import CommandResult, add_command

def add_parser(subparsers):
    command = add_command(subparsers, "greet", run, help="greet", example="axcore greet Ann")
    command.add_argument("name")

def run(args):
    return CommandResult({"greeted": args.name}, f"hello, {args.name}")
"""


def test_a_plugin_adds_a_command(cli, module, plugin_host):
    module("greet_command", GREET_COMMAND)
    plugin_host(acme=GREET)
    assert cli("greet", "Ann").out == "hello, Ann\n"
    assert cli("greet", "Ann", "--json").json == {"greeted": "Ann"}
    assert "did you mean 'greet'?" in cli("gret").err


def test_a_broken_plugin_breaks_no_command_and_is_named_when_one_is_missing(cli, plugin_host):
    plugin_host(broken="1 / 0")
    assert cli("config", "show", "tiny-lm").code == 0
    done = cli("greet")
    assert done.code == 2 and "broken" in done.err


def test_a_failing_check_prints_its_document_and_exits_2(cli, plugin_host):
    plugin_host(broken="1 / 0")
    done = cli("plugins", "check", "--json")
    assert done.code == 2
    assert {r["name"]: r["status"] for r in done.json}["broken"] == "failed"


def test_no_plugins_hides_a_plugins_command(cli, module, plugin_host, monkeypatch):
    monkeypatch.setenv("AXCORE_LOAD_PLUGINS", "anything")  # put back afterwards
    module("greet_command", GREET_COMMAND)
    plugin_host(acme=GREET)
    assert cli("greet", "Ann", "--no-plugins").code == 2


# Failures and the console -------------------------------------------------------------------


def test_notes_of_an_error_and_of_its_cause_are_shown_once(capsys):
    cause = TypeError("shapes")
    cause.add_note("in m.up (Linear.forward) called with (float32[2,3])")
    error = ConfigError("bad", code="AX101")
    error.__cause__ = cause
    failure = Failure.of(error)
    failure.print()
    assert capsys.readouterr().err.splitlines() == [
        "error: bad [AX101]",
        "  in m.up (Linear.forward) called with (float32[2,3])",
    ]
    assert failure.to_json()["notes"] == ["in m.up (Linear.forward) called with (float32[2,3])"]


def test_a_full_disk_is_the_users_to_fix():
    failure = Failure.of(OSError(errno.ENOSPC, "No space left on device", "/data/x"))
    assert (failure.exit_code, failure.where) == (2, "/data/x")
    assert "space" in str(failure.hint)


def test_running_out_of_device_memory_exits_3():
    failure = Failure.of(RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM"))
    assert failure.exit_code == 3 and "batch_size" in str(failure.hint)


def test_only_our_own_log_lines_and_warnings_are_shown(capsys):
    with console(), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.getLogger("axcore.x").warning("of ours")
        logging.getLogger("axcore.x").info("news")
        logging.getLogger("jax").warning("noise")
        warnings.warn("an edit is lost", ConfigWarning, stacklevel=1)
        warnings.warn("noise", DeprecationWarning, stacklevel=1)
    assert capsys.readouterr().err.splitlines() == [
        "warning: of ours",
        "news",
        "warning: an edit is lost",
    ]


def test_logging_is_as_before_afterwards():
    ours = logging.getLogger("axcore")
    before = (list(ours.handlers), ours.level, ours.propagate, logging.getLogger("jax").level)
    with console():
        pass
    after = (list(ours.handlers), ours.level, ours.propagate, logging.getLogger("jax").level)
    assert after == before


def test_numbers_that_json_lacks_are_null(cli, monkeypatch):
    import axcore.cli.doctor as doctor
    from axcore.cli import CommandResult

    monkeypatch.setattr(
        doctor, "_devices", lambda problems: [{"id": float("nan"), "platform": "", "kind": ""}]
    )
    assert cli("doctor", "--json").json["devices"][0]["id"] is None
    assert json.dumps(CommandResult({}, "").data) == "{}"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("train tiny-lm --out a --out b", "--out is given twice: 'a', then 'b'"),
        ("train tiny-lm --out a --instance cpu-2 --instance=cpu", "--instance is given twice"),
        ("train tiny-lm --out a --max-step 3 --max-step 3", "--max-step is given twice: 3, then 3"),
        ("config show tiny-lm --instance cpu --instance cpu-2", "--instance is given twice"),
    ],
)
def test_a_flag_that_takes_one_value_is_given_once(cli, flags, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = cli(*flags.split())
    assert done.code == 2 and told in done.err and "AX983" in done.err
    assert not list(tmp_path.iterdir())


def test_flags_that_may_be_repeated_are(cli):
    flags = "--set seed=1 --set batch_size=2 --json --json --debug --debug"
    done = cli("config", "show", "tiny-lm", *flags.split())
    assert done.code == 0, done.err


def test_a_parser_takes_a_flag_once_a_line():
    parser = Parser()
    parser.add_argument("--out")
    assert [parser.parse_args(["--out", name]).out for name in "ab"] == ["a", "b"]
