"""A new backend: a machine of eight devices, with a rule for every experiment."""
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402

# %% plugin
from axcore.plugins import CompilerOptionSpec, InstanceTypeSpec, MeshRuleSpec, hookimpl

MACHINE = __name__.rpartition(".")[0] + ".feature"


@hookimpl
def axcore_instance_types():
    """The machine."""
    return [
        InstanceTypeSpec(
            pattern="acme-x1-*", family="x1", platform="cpu", target=f"{MACHINE}:resolve"
        )
    ]


@hookimpl
def axcore_mesh_rules():
    """How it is used."""
    return [
        MeshRuleSpec(
            name="x1", pattern="acme-x1-*", target=f"{MACHINE}:RULE", reason="little memory"
        )
    ]


@hookimpl
def axcore_compiler_options():
    """What its compiler is told."""
    return [
        CompilerOptionSpec(
            name="x1", pattern="acme-x1-*", key="xla_acme_fast", value=True, reason="it is faster"
        )
    ]


# %% feature
from axcore.parallel import MeshShapeModifier
from axcore.plugins import Instance

RULE = MeshShapeModifier.Config(mesh_shape={"fsdp": -1, "model": 2})


def resolve(name):
    """Returns the machine of a name such as ``acme-x1-8``."""
    return Instance(
        name=name,
        family="x1",
        platform="cpu",
        num_hosts=1,
        devices_per_host=int(name.rpartition("-")[2]),
        hbm_bytes=2**30,
    )


# %% integration
def integrate(cfg):
    """Nothing: the machine is named on the command line, ``--instance acme-x1-8``."""


# %% check
from axcore.parallel import apply_instance_rules, resolve_instance


def is_present(cfg, model):
    """Whether the machine is known."""
    return resolve_instance("acme-x1-8").num_devices == 8


def check(probe):
    """The experiment is fitted to the machine by its rule, and computes the same there."""
    fitted, _ = apply_instance_rules(probe.after, "acme-x1-8")
    probe.require((fitted.mesh_shape.fsdp, fitted.mesh_shape.model) == (-1, 2), "the rule's mesh")
    probe.require(fitted.compiler_options["xla_acme_fast"] is True, "the compiler's option")
    elsewhere, _ = apply_instance_rules(probe.before, "cpu")
    probe.require(elsewhere.mesh_shape != fitted.mesh_shape, "another mesh than elsewhere")
    target = probe.target(fitted, resolve_instance("acme-x1-8"))
    logits = probe.logits(probe.after_model, probe.after_params, target=target)
    probe.same(logits, probe.before_logits, "the same numbers")
