"""DeepCTR's models as they are, converted: they train as stock, on one worker and on two."""

import json
import re
import sys

import pytest

from tests.multiprocess.harness import run


@pytest.mark.parametrize(
    "ranks, steps, models",
    [
        (1, 20, ["WDL", "DeepFM", "DCN", "xDeepFM", "DIN"]),
        (1, 3, ["AFM", "AutoInt", "CCPM", "DCNMix", "DIFM", "DeepFEFM", "EDCN", "FGCNN"]),
        (1, 3, ["FLEN", "FNN", "FiBiNET", "FwFM", "IFM", "MLR", "NFM", "ONN", "PNN"]),
        pytest.param(2, 20, ["DeepFM", "DIN"], marks=pytest.mark.multiprocess),
    ],
)
def test_models_of_deepctr_are_trained_as_stock_saved_loaded_and_exported(ranks, steps, models, deepctr, monkeypatch):
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    command = [sys.executable, "-m", "tests.sok.deepctr_script", str(deepctr), str(steps), *models]
    job = run(command, ranks=ranks, deadline=600, fresh_workers=True)
    found = re.search(r"differences: (\{.*\})", job.output)
    assert job.returncode == 0 and found, job.output[-4000:]
    differences = json.loads(found.group(1))
    assert list(differences) == models and max(differences.values()) < 1e-5, differences
