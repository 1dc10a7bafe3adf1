"""No file of ours is too long to be read in one go."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINES = 500
# Folders of ours: beside them lie what is built and installed.
OURS = (
    "benchmarks",
    "cmake",
    "cpu",
    "cuda",
    "distributed_embeddings",
    "examples",
    "include",
    "openembedding",
    "ops",
    "scripts",
    "sok",
    "sparse_operation_kit",
    "storage",
    "tests",
)


def sources() -> list[Path]:
    files = [path for folder in OURS for path in (ROOT / folder).rglob("*")]
    return [path for path in files if path.suffix in (".py", ".cc", ".h", ".cu")]


def test_files_have_500_lines_at_the_most():
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in sources()}
    assert {path.suffix for path in lengths} == {".py", ".cc", ".h", ".cu"} and len(lengths) > 500
    too_long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > LINES}
    assert not too_long, "split these by what they are about"
