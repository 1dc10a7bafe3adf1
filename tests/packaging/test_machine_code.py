"""Kernels take no more registers, stack and shared memory than they did, and next to no more instructions."""

from pathlib import Path

import pytest

from sok.base import _ops
from tests.packaging import machine_code
from tests.packaging.machine_code import Kernel

RENEW = "if that is meant: python -m tests.packaging.machine_code"


def worse(before: dict[str, Kernel], now: dict[str, Kernel]) -> list[str]:
    """What is more than it may be, in words."""
    return [
        f"{name}: {field} {getattr(before[name], field)} -> {getattr(kernel, field)}"
        for name, kernel in now.items()
        for field in (Kernel._fields if name in before else ())
        if getattr(kernel, field) > getattr(before[name].most(), field)
    ]


def test_kernels_take_no_more_than_they_did():
    info = _ops.build_info() or {}
    toolkit, before = machine_code.read(machine_code.GOLDEN)
    if info.get("cuda", "none") != toolkit:
        pytest.skip(f"the numbers are of nvcc {toolkit}, the library of {info.get('cuda', 'none')}")
    now = machine_code.kernels_in(Path(_ops.library_path()).with_name("libsok_cuda.so"))
    if not now:
        pytest.skip("the library has no machine code for sm_80")
    assert len(now) > 200 and all(kernel.registers > 4 and kernel.instructions > 8 for kernel in now.values())
    # That the columns are what they are called: what has a stack uses it, and an update reads and writes rows.
    assert all((kernel.stack > 0) == (kernel.local > 0) for kernel in now.values())
    assert all(kernel.loads and kernel.stores for name, kernel in now.items() if name.startswith("UpdateRows"))
    assert sorted(set(now) ^ set(before)) == [], RENEW
    assert worse(before, now) == [], RENEW


def test_a_kernel_that_takes_more_is_seen(tmp_path):
    before = {"FindKernel": Kernel(30, 0, 0, 0, 10, 2, 0, 200), "FillKernel": Kernel(40, 64, 512, 9, 4, 4, 6, 3000)}
    machine_code.write(tmp_path / "golden.tsv", before, "13.0.88")
    assert machine_code.read(tmp_path / "golden.tsv") == ("13.0.88", before)
    assert worse(before, before) == []
    better = {name: Kernel(*(n // 2 for n in kernel)) for name, kernel in before.items()}
    assert worse(before, better) == []
    for field in Kernel._fields:
        most = before["FillKernel"].most()
        now = {**before, "FillKernel": most._replace(**{field: getattr(most, field) + 1})}
        (said,) = worse(before, now)
        assert said.startswith(f"FillKernel: {field} {getattr(before['FillKernel'], field)} -> ")


@pytest.mark.parametrize(
    ("whole", "ours"),
    [
        ("sok::(anonymous namespace)::FindKernel(sok::HashTableView, unsigned long const*, long)", "FindKernel"),
        ("void sok::SumKernel<sok::Addends<float> >(sok::PieceSums, X<int>)", "SumKernel<Addends<float> >"),
        ("void sok::ElectKernel<(sok::Speaker)1>(sok::(anonymous namespace)::Group, long)", "ElectKernel<(Speaker)1>"),
    ],
)
def test_kernels_have_short_names(whole, ours):
    assert machine_code.short(whole) == ours
