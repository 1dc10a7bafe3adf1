"""Who knows whom: the imports between our modules, and the includes between our C++ folders."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imports_of(path: Path) -> dict[str, bool]:
    """Maps each module that the file imports to whether it does so when it is itself imported."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        child
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.walk(function)
    }
    # What stands under `if TYPE_CHECKING:` is for readers and tools and is never imported.
    unseen = {
        child
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.unparse(test.test)
        for statement in test.body
        for child in ast.walk(statement)
    }
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if node in unseen:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1]] if node.level else [])
            module = ".".join(part for part in (base, node.module) if part)
            # `from sok import table` is an import of sok.table.table.
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        for name in names:
            found[name] = found.get(name, False) or node not in lazy
    return found


def python_files(*patterns: str) -> list[Path]:
    found = {pattern: list(ROOT.glob(pattern)) for pattern in patterns}
    missing = [pattern for pattern, files in found.items() if not files]
    assert not missing, f"nothing matches {missing}: this test would not see anything"
    return sorted(path for files in found.values() for path in files)


def offenders(files: list[Path], forbidden: str, *, only_eager: bool = False) -> list[str]:
    """The imports in `files` that match the regular expression, as 'file imports module'."""
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module, is_eager in imports_of(path).items()
        if re.fullmatch(forbidden, module) and (is_eager or not only_eager)
    ]


def test_the_reader_of_imports_sees_every_form(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "sok" / "layers" / "example.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import sok.table.table\nfrom sok import lookup\nfrom ..transport import base\nfrom . import all2all\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import never\n"
        "def late():\n    import horovod.tensorflow as hvd\n"
    )
    found = imports_of(path)
    assert {"sok.table.table", "sok.lookup", "sok.job.transport.base", "sok.layers.all2all"} <= set(found)
    assert "never" not in found
    assert found["sok.table.table"] is True
    assert found["horovod.tensorflow"] is False
    assert offenders([path], r"sok\.table") == ["sok/layers/example.py imports sok.table.table"]
    assert offenders([path], r"horovod\b.*", only_eager=True) == []


def test_only_the_horovod_transport_knows_horovod_and_imports_it_on_first_use():
    files = python_files("sok/**/*.py")
    others = [path for path in files if path != ROOT / "sok/job/transport/horovod.py"]
    assert offenders(others, r"horovod(\..*)?") == []
    assert offenders(files, r"horovod(\..*)?", only_eager=True) == []


def test_only_ops_loads_the_native_library():
    users = [path.name for path in python_files("sok/**/*.py") if "load_op_library" in path.read_text(encoding="utf-8")]
    assert users == ["_ops.py"]


def test_the_ground_floor_knows_nothing_of_ours():
    files = python_files("sok/base/_ops.py", "sok/table/weights.py", "sok/base/keras_calls.py")
    assert offenders(files, r"sok(\..*)?") == []


def test_a_pattern_that_matches_no_file_is_an_error():
    with pytest.raises(AssertionError, match=r"nothing matches \['sok/no_such_file.py'\]"):
        python_files("sok/base/_ops.py", "sok/no_such_file.py")


def test_gradients_are_imported_by_the_loader_of_the_library_and_know_it_alone():
    assert "import_module(_GRADIENTS_MODULE)" in (ROOT / "sok/base/_ops.py").read_text(encoding="utf-8")
    assert offenders(python_files("sok/base/_gradients.py"), r"sok\.(?!_ops(\..*)?$).*") == []


def test_files_that_our_texts_name_are_there():
    texts = [*python_files("sok/**/*.py", "tests/**/*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    named = re.compile(r"(?<![\w/.-])(?:sok|tests|scripts|examples|benchmarks)/[\w/]+\.(?:py|sh)\b")
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts
        if path != Path(__file__)
        for name in named.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_transports_know_no_tables_and_layers():
    assert offenders(python_files("sok/transport/*.py"), r"sok\.(table|lookup|inputs|layers|optimizers)(\..*)?") == []


def test_tables_lookup_and_optimizers_know_no_layers_and_no_particular_transport():
    files = python_files(
        "sok/table/table.py", "sok/lookup/lookup.py", "sok/table/initializers.py", "sok/optimizers/*.py"
    )
    assert offenders(files, r"sok\.layers(\..*)?|sok\.transport\.(local|horovod)(\..*)?") == []


def test_checkpoints_know_no_layers_and_no_particular_transport():
    files = python_files("sok/checkpoint/*.py", "sok/table/state.py")
    assert offenders(files, r"sok\.layers(\..*)?|sok\.transport\.(local|horovod)(\..*)?") == []


def test_layers_know_no_native_ops_and_no_optimizer_internals():
    assert offenders(python_files("sok/layers/*.py"), r"sok\._ops(\..*)?|sok\.optimizers\..*") == []


def test_the_judge_knows_only_numpy():
    files = python_files("tests/reference/*.py")
    assert offenders(files, r"(sok|tensorflow|keras|tf_keras|horovod)(\..*)?") == []


@pytest.mark.parametrize("folder", ["include", "cpu", "storage"])
def test_the_core_includes_no_tensorflow_and_no_cuda(folder):
    forbidden = re.compile(r'#include\s*[<"](tensorflow|xla|tsl|Eigen|cuda|cub|thrust|Python\.h)')
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".h", ".cc")]
    assert files
    found = [path.name for path in files if forbidden.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_ops_contain_no_kernels():
    files = [path for path in (ROOT / "ops").rglob("*") if path.is_file()]
    assert files
    found = [path.name for path in files if re.search(r"__global__|<<<", path.read_text(encoding="utf-8"))]
    assert found == []
