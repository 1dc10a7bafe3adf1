from collections.abc import Iterator

import pytest

import sok


@pytest.fixture(scope="module")
def feature_columns() -> Iterator[None]:
    """A job of one worker; afterwards TensorFlow's `input_layer` is what it was."""
    sok.Init()
    yield
    sok.feature_column.uninstall()
