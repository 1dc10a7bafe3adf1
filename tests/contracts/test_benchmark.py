"""The benchmark of the CUDA kernels runs to its end without a device; its figures then mean nothing, as it says."""

import json


def test_every_case_of_the_benchmark_runs_in_the_emulator(emulated_library, monkeypatch, tmp_path, capsys):
    from benchmarks.cuda.__main__ import main

    monkeypatch.setenv("SOK_CUDA_LIBRARY", emulated_library)
    assert main(["--emulate", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["emulated"] is True
    names = [case["name"] for case in figures["cases"]]
    for part in ("gather", "unique of", "unique + segment sum", "adagrad", "adam", "find", "Merlin tiny", "hashed"):
        assert any(part in name for name in names), part
    assert all(case["ms"] > 0 and case["floor_bytes"] > 0 for case in figures["cases"])
    assert "these figures say nothing about any GPU" in capsys.readouterr().out


def test_emulation_asks_for_the_library(monkeypatch, capsys):
    import pytest

    from benchmarks.cuda.__main__ import main

    monkeypatch.delenv("SOK_CUDA_LIBRARY", raising=False)
    with pytest.raises(SystemExit):
        main(["--emulate"])
    assert "SOK_CUDA_LIBRARY" in capsys.readouterr().err
