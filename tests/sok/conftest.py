from collections.abc import Iterator
from pathlib import Path

import pytest

import sok
from tests.sok.stranger import Stranger


@pytest.fixture(scope="session")
def stranger(tmp_path_factory) -> Iterator[Stranger]:
    """A process that knows TensorFlow and not `sok`."""
    process = Stranger(tmp_path_factory.mktemp("stranger"))
    yield process
    process.close()


@pytest.fixture
def path(tmp_path) -> Path:
    """Where a model is to be exported."""
    return tmp_path / "model" / "1"


@pytest.fixture(scope="module")
def feature_columns() -> Iterator[None]:
    """A job of one worker; afterwards TensorFlow's `input_layer` is what it was."""
    sok.Init()
    yield
    sok.feature_column.uninstall()
