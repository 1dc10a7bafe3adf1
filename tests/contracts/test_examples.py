"""The examples of docs/gpu.md and of the docstrings of sok.cuda run on a device, as they stand."""

import doctest
import importlib

import numpy as np
import pytest

from tests.test_docs import BLOCKS


@pytest.mark.gpu
def test_the_programs_of_the_page_run(monkeypatch):
    for library in ("numba", "torch"):
        pytest.importorskip(library)
    # numba-cuda asks for it when it compiles its first kernel, and NumPy 2.5 has it no more.
    monkeypatch.setattr(np, "row_stack", np.vstack, raising=False)
    names = {}
    for block in BLOCKS["docs/gpu.md"]:
        exec(compile(block.code, str(block), "exec"), names)
    table, user = names["table"], names["user"]
    assert (table.size(), user.size()) == (8, 1)
    assert names["row_ids"].tolist() == names["found"].tolist() == list(range(8))
    names["stream"].synchronize()
    stored = table.lookup(names["cupy"].arange(8), insert=False).rows
    np.testing.assert_array_equal(names["pooled"].cpu().numpy(), 2 * stored.get())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "module", ["sok.cuda", "sok.cuda.combining", "sok.cuda.keys", "sok.cuda.table", "sok.cuda.table_group"]
)
def test_the_examples_of_docstrings_run(module):
    import cupy

    loaded = importlib.import_module(module)
    ran = 0
    for case in doctest.DocTestFinder(exclude_empty=True).find(loaded, module, extraglobs={"cupy": cupy}):
        for example in case.examples:
            example.options = {}  # without +SKIP
            example.source = example.source.replace("# doctest: +SKIP", "")
        said = []
        runner = doctest.DocTestRunner()
        runner.run(case, out=said.append)
        assert not runner.failures, "".join(said)
        ran += runner.tries
    assert ran > 0
