import os
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


def _real_data(variable: str) -> str:
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"set {variable} to the path of the data")
    return path


@pytest.fixture
def criteo_sample() -> str:
    return _real_data("SOK_CRITEO_SAMPLE")


@pytest.fixture
def avazu_sample() -> str:
    return _real_data("SOK_AVAZU_SAMPLE")


@pytest.fixture
def movielens_dir() -> str:
    return _real_data("SOK_MOVIELENS_DIR")
