"""What the seven ``pyproject.toml`` files declare."""

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MAX_DIRECT_DEPENDENCIES = 12
CAPPED = {"<", "<=", "==", "===", "~="}


def _requirements(project) -> dict[str, Requirement]:
    parsed = map(Requirement, project.metadata["dependencies"])
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def _extras(project) -> dict[str, list[Requirement]]:
    extras = project.metadata.get("optional-dependencies", {})
    return {name: [*map(Requirement, lines)] for name, lines in extras.items()}


def test_there_are_seven_distributions(projects):
    tails = ["gpu", "models", "moe", "neuron", "rope", "tpu"]
    assert list(projects) == ["axcore", *(f"axlearn-{tail}" for tail in tails)]


def test_version_equals_that_of_core_and_of_the_package(project, projects):
    version = project.metadata["version"]
    assert version == projects["axcore"].metadata["version"]
    text = (project.package / "__init__.py").read_text()
    assert re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE) == [version]


def test_ranges_between_our_distributions_hold_this_version_and_end_before_the_next_minor(projects):
    version = projects["axcore"].metadata["version"]
    major, minor, _ = map(int, version.split("."))
    found = []
    for project in projects.values():
        extras = [line for lines in _extras(project).values() for line in lines]
        for requirement in [*_requirements(project).values(), *extras]:
            if requirement.name in projects:
                found.append((project.name, requirement.name))
                assert requirement.specifier.contains(version), requirement
                assert not requirement.specifier.contains(f"{major}.{minor + 1}.0"), requirement
    plugins = [name for name in projects if name != "axcore"]
    between = [("axlearn-models", "axlearn-rope"), ("axlearn-models", "axlearn-moe")]
    assert sorted(found) == sorted([(name, "axcore") for name in plugins] + between)


def test_core_has_few_direct_dependencies_and_caps_none(projects):
    requirements = _requirements(projects["axcore"])
    assert len(requirements) <= MAX_DIRECT_DEPENDENCIES
    assert not {"torch", "tensorflow"} & set(requirements)
    for requirement in requirements.values():
        assert not CAPPED & {part.operator for part in requirement.specifier}, requirement


def test_every_extra_installs_something(project):
    assert all(_extras(project).values())


@pytest.mark.parametrize(
    ("name", "extras"),
    [
        ("axcore", {"plots", "tensorboard"}),
        ("axlearn-tpu", {"tpu", "aot"}),
        ("axlearn-gpu", {"cuda12", "cuda13", "aot", "aot-full"}),
        ("axlearn-neuron", {"neuron"}),
        ("axlearn-models", {"moe"}),
    ],
)
def test_named_extras_exist(projects, name, extras):
    assert extras <= set(_extras(projects[name]))


def test_gpu_brings_jax_triton_on_linux_only(projects):
    marker = _requirements(projects["axlearn-gpu"])["jax-triton"].marker
    assert marker is not None
    assert marker.evaluate({"sys_platform": "linux"})
    assert not marker.evaluate({"sys_platform": "darwin"})


def test_neuron_extra_refuses_the_empty_public_release(projects):
    (requirement,) = _extras(projects["axlearn-neuron"])["neuron"]
    assert requirement.name == "jax-neuronx"
    assert not requirement.specifier.contains("0.0.0")
    assert "jax-neuronx" not in _requirements(projects["axlearn-neuron"])


def test_plugin_registers_under_its_own_name(plugin):
    module = plugin.package.name
    assert plugin.metadata["entry-points"] == {"axcore": {plugin.name: f"{module}.plugin"}}


def test_same_python_and_licence_everywhere(project, projects):
    core = projects["axcore"]
    for key in ("requires-python", "license"):
        assert project.metadata[key] == core.metadata[key]
    assert (project.folder / "LICENSE").read_text() == (core.folder / "LICENSE").read_text()


def test_changelog_has_a_section_for_this_version(project):
    text = (project.folder / "CHANGELOG.md").read_text()
    assert text.startswith(f"# Changelog of {project.name}\n")
    assert f"\n## {project.metadata['version']}" in text


def test_readme_names_every_extra(project):
    text = (project.folder / "README.md").read_text()
    assert text.startswith(f"# {project.name}\n")
    assert [extra for extra in _extras(project) if f"[{extra}]" not in text] == []
