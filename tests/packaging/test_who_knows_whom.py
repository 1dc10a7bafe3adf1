"""Who knows whom: the imports between our modules, and the includes between our C++ folders."""

import ast
import re
from pathlib import Path

import pytest

from sok.base import _ops

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
            # `from sok import table` is an import of sok.table.
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
        "import sok.table\nfrom sok import lookup\nfrom ..transport import base\nfrom . import all2all\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import never\n"
        "def late():\n    import horovod.tensorflow as hvd\n"
    )
    found = imports_of(path)
    assert {"sok.table", "sok.lookup", "sok.transport.base", "sok.layers.all2all"} <= set(found)
    assert "never" not in found
    assert found["sok.table"] is True
    assert found["horovod.tensorflow"] is False
    assert offenders([path], r"sok\.table") == ["sok/layers/example.py imports sok.table"]
    assert offenders([path], r"horovod\b.*", only_eager=True) == []


# From the ground up. A module imports from its own room and from those before it; names alone stand outside of rooms.
ROOMS = (
    *("base", "job", "table", "lookup", "optimizers", "distributed"),
    *("checkpoint", "saved_model", "cuda", "keras", "planning", "compat", "tools"),
)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def edges_between(files: list[Path]) -> dict[str, list[str]]:
    """What each module imports of ours, on first use too; a name that is no module counts as the module it is of."""
    modules = {module_of(path): path for path in files}

    def known(name: str) -> str:
        return name if name in modules or "." not in name else known(name.rpartition(".")[0])

    def found(path: Path) -> list[str]:
        names = imports_of(path)
        # `from sok.table import keys` imports sok.table.keys; that the room itself is imported too says nothing.
        precise = {known(n) for n in names if known(n) != n or not any(m.startswith(f"{n}.") for m in names)}
        return sorted(precise & set(modules) - {"sok", module_of(path)})

    return {module: found(path) for module, path in modules.items()}


def circles_in(edges: dict[str, list[str]]) -> list[str]:
    """Modules that are on a circle: what is left when modules that import nothing of the rest go, again and again."""
    left = dict(edges)
    while free := [module for module, imported in left.items() if not set(imported) & set(left)]:
        for module in free:
            del left[module]
    while unused := [module for module in left if not any(module in imported for imported in left.values())]:
        for module in unused:
            del left[module]
    return sorted(left)


def upward(edges: dict[str, list[str]]) -> list[str]:
    def floor(module: str) -> int:
        room = module.split(".")[1] if "." in module else ""
        return ROOMS.index(room) if room in ROOMS else len(ROOMS)

    return [f"{a} imports {b}" for a, imported in edges.items() for b in imported if floor(b) > floor(a)]


def test_rooms_know_those_below_them_and_no_module_knows_itself_by_a_detour():
    edges = edges_between(python_files("sok/**/*.py"))
    assert len(edges) > 100 and sum(map(len, edges.values())) > 300
    assert upward(edges) == []
    assert circles_in(edges) == []
    assert {module.split(".")[1] for module in edges if module.count(".") > 1} == {*ROOMS, "tf"}


def test_circles_and_upward_imports_are_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    texts = {
        "sok/job/a.py": "from sok.table import b",
        "sok/table/b.py": "def late():\n    import sok.table.c",
        "sok/table/c.py": "from sok.job.a import name",
        "sok/table/d.py": "from sok.table import b, c",
        "sok/base/e.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    edges = edges_between(python_files("sok/**/*.py"))
    assert edges["sok.table.d"] == ["sok.table.b", "sok.table.c"]
    assert circles_in(edges) == ["sok.job.a", "sok.table.b", "sok.table.c"]
    assert upward(edges) == ["sok.job.a imports sok.table.b"]


def test_only_the_horovod_transport_knows_horovod_and_imports_it_on_first_use():
    files = python_files("sok/**/*.py")
    others = [path for path in files if path != ROOT / "sok/job/transport/horovod.py"]
    assert offenders(others, r"horovod(\..*)?") == []
    assert offenders(files, r"horovod(\..*)?", only_eager=True) == []


def test_only_ops_loads_the_native_library():
    users = [path.name for path in python_files("sok/**/*.py") if "load_op_library" in path.read_text(encoding="utf-8")]
    assert users == ["_ops.py"]


def test_the_ground_floor_knows_nothing_of_ours():
    files = python_files("sok/base/_ops.py", "sok/base/errors.py", "sok/base/keras_calls.py", "sok/table/weights.py")
    files += python_files("sok/base/patching.py")
    assert offenders(files, r"sok(?!\.base\.patching\b)(\..*)?") == []


def test_a_pattern_that_matches_no_file_is_an_error():
    with pytest.raises(AssertionError, match=r"nothing matches \['sok/no_such_file.py'\]"):
        python_files("sok/base/_ops.py", "sok/no_such_file.py")


def test_what_the_loader_of_the_library_loads_by_name_is_there():
    for module in _ops._REGISTERED:
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
    assert offenders(python_files("sok/lookup/gradients.py"), r"sok\.(?!base(\._ops(\..*)?)?$).*") == []


def test_files_that_our_texts_name_are_there():
    texts = [*python_files("sok/**/*.py", "tests/**/*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    folders = "sok|tests|scripts|examples|benchmarks|include|cpu|cuda|ops|storage"
    named = re.compile(rf"(?<![\w/.-])(?:{folders})/[\w/]+\.(?:py|sh|h|cc|cu)\b")
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts
        if path != Path(__file__)
        for name in named.findall(path.read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    ]
    assert missing == []


def test_only_the_job_knows_a_particular_transport():
    files = [path for path in python_files("sok/**/*.py") if "job" not in path.parts]
    assert offenders(files, r"sok\.job\.transport\.(local|horovod)(\..*)?") == []


def test_layers_know_no_native_ops_and_no_optimizer_internals():
    assert offenders(python_files("sok/keras/layers/*.py"), r"sok\.base\._ops(\..*)?|sok\.optimizers\..*") == []


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


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("ops", r"__global__|<<<"),
        ("ops", r'#include\s*"(\.\./)+(cpu|cuda|storage)/'),
        ("cpu", r'#include\s*"(\.\./)+(ops|cuda|storage)/'),
        ("cuda", r'#include\s*"(\.\./)+(ops|cpu|storage)/'),
        ("storage", r'#include\s*"(\.\./)+(ops|cpu|cuda)/'),
        ("include", r'#include\s*"(\.\./)+'),
    ],
)
def test_native_folders_meet_in_the_promises_alone(folder, forbidden):
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert files
    found = [path.name for path in files if re.search(forbidden, path.read_text(encoding="utf-8"))]
    assert found == []
