"""Fixtures for tests of plugins; pytest loads this module wherever axcore is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from axcore.plugins import PluginHost


@pytest.fixture(scope="session")
def plugin_host() -> PluginHost:
    """The host with all installed plugins and none of the environment's filters."""
    from axcore.plugins import PluginHost

    return PluginHost()
