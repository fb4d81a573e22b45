"""The wheels that tests install, each built once."""

from pathlib import Path

import pytest

from tests.plugins.environments import ROOT, wheel_of


@pytest.fixture(scope="session")
def headrace_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheels"))
