"""Loading the native library: once, and with errors that say how to repair what is wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from sok.base import _ops


@pytest.fixture
def native_dir(tmp_path, monkeypatch):
    """An empty folder where sok looks for its library, in a process that has loaded none."""
    monkeypatch.setattr(_ops, "_NATIVE_DIR", tmp_path)
    monkeypatch.setattr(_ops, "_library", None)
    monkeypatch.setattr(_ops, "_serving_library", None)
    monkeypatch.setattr(_ops, "_is_ready", False)
    return tmp_path


def write_build_info(folder: Path, tensorflow_version: str) -> None:
    (folder / "build_info.json").write_text(json.dumps({"tensorflow_version": tensorflow_version}))


def test_missing_library_says_where_it_should_be_and_what_to_run(native_dir):
    with pytest.raises(ImportError) as caught:
        _ops.lib()
    assert isinstance(caught.value, _ops.NativeLibraryError)
    message = str(caught.value)
    assert str(native_dir / "libsok_ops.so") in message
    assert "does not exist" in message
    assert "pip install --no-build-isolation" in message


def test_a_missing_library_for_servers_says_the_same(native_dir):
    with pytest.raises(_ops.NativeLibraryError, match=r"libsok_serving\.so does not exist"):
        _ops.serving_lib()


def test_remedy_in_a_checkout_is_make_native(tmp_path, monkeypatch):
    (tmp_path / "CMakeLists.txt").touch()
    monkeypatch.setattr(_ops, "_NATIVE_DIR", tmp_path / "sok" / "_native")
    assert "make native" in _ops.remedy()
    assert str(tmp_path) in _ops.remedy()


def test_library_for_another_tensorflow_is_refused_before_it_is_loaded(native_dir):
    # Not a library at all: had it been loaded, the message would be another.
    (native_dir / "libsok_ops.so").write_text("not a library")
    write_build_info(native_dir, "1.15.5")
    with pytest.raises(_ops.NativeLibraryError) as caught:
        _ops.lib()
    message = str(caught.value)
    assert f"was built for TensorFlow 1.15.5, but this is TensorFlow {tf.__version__}" in message
    assert "`pip install 'tensorflow==1.15.*'`. Or build it for this TensorFlow: run `pip install" in message


def test_library_with_the_strings_of_another_abi_is_refused_before_it_is_loaded(native_dir):
    (native_dir / "libsok_ops.so").write_text("not a library")
    other = 1 - tf.sysconfig.CXX11_ABI_FLAG
    info = {"tensorflow_version": tf.__version__, "cxx11_abi": other}
    (native_dir / "build_info.json").write_text(json.dumps(info))
    with pytest.raises(_ops.NativeLibraryError, match=f"with _GLIBCXX_USE_CXX11_ABI={other}, but this TensorFlow"):
        _ops.lib()


def test_library_for_another_patch_release_is_not_refused_for_that(native_dir):
    (native_dir / "libsok_ops.so").write_text("not a library")
    write_build_info(native_dir, ".".join([*tf.__version__.split(".")[:2], "999"]))
    with pytest.raises(_ops.NativeLibraryError, match="does not load into TensorFlow"):
        _ops.lib()


def test_file_that_is_no_library_says_what_the_loader_said(native_dir):
    (native_dir / "libsok_ops.so").write_text("not a library")
    with pytest.raises(_ops.NativeLibraryError, match="built for an unknown version") as caught:
        _ops.lib()
    assert "invalid ELF header" in str(caught.value) or "file too short" in str(caught.value)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_library_with_an_undefined_symbol_names_it(native_dir):
    source = native_dir / "broken.cc"
    source.write_text("int sok_symbol_of_another_tensorflow();\nint value = sok_symbol_of_another_tensorflow();\n")
    library = native_dir / "libsok_ops.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    write_build_info(native_dir, tf.__version__)
    with pytest.raises(_ops.NativeLibraryError) as caught:
        _ops.lib()
    assert "sok_symbol_of_another_tensorflow" in str(caught.value)
    assert f"built for {tf.__version__}" in str(caught.value)


def test_failed_load_can_be_tried_again(native_dir):
    for _ in range(2):
        with pytest.raises(_ops.NativeLibraryError, match="is missing"):
            _ops.lib()


def test_build_info_tells_what_the_library_was_built_with():
    info = _ops.build_info()
    assert info is not None
    assert info["tensorflow_version"] == tf.__version__
    assert info["cxx11_abi"] == tf.sysconfig.CXX11_ABI_FLAG
    assert set(info) >= {"sok_version", "compiler", "git_version", "date", "system"}


def test_unreadable_build_info_is_none(native_dir):
    assert _ops.build_info() is None
    (native_dir / "build_info.json").write_text("{")
    assert _ops.build_info() is None


@pytest.mark.parametrize(
    ("built_for", "text"), [(None, "does not exist"), ("1.15.5", "was built for TensorFlow 1.15.5")]
)
def test_the_first_public_name_already_says_what_is_wrong(native_dir, built_for, text, monkeypatch):
    import sok

    if built_for:
        (native_dir / "libsok_ops.so").write_text("not a library")
        write_build_info(native_dir, built_for)
    monkeypatch.delitem(vars(sok), "Init", raising=False)
    with pytest.raises(ImportError, match=text):
        from sok import Init  # noqa: F401


@pytest.mark.parametrize("name", ["libsok_ops.so", "libsok_cuda.so"])
def test_cudas_runtime_is_inside_and_hidden(name):
    """TensorFlow exports stubs of it: kernels of one toolkit would run on the runtime of another, or on none."""
    library = Path(_ops.library_path()).with_name(name)
    if (_ops.build_info() or {}).get("cuda", "none") == "none":
        pytest.skip("built without CUDA")
    symbols = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
    assert "sok" in symbols.lower()
    assert [line for line in symbols.splitlines() if re.search(r" _*cuda[A-Z]", line)] == []


TRAINS = """
import tensorflow as tf, sok
table = sok.EmbeddingVariable(4, 100, initializer="ones")
optimizer = sok.optimizers.SGD(0.5)
with tf.GradientTape() as tape:
    rows = sok.group_embedding_lookup([table], [tf.constant([7, 9], tf.int64)])[0]
    loss = tf.reduce_sum(rows)
optimizer.apply_gradients([(tape.gradient(loss, table), table)])
print(tf.__file__, table.export()[1].numpy().tolist())
"""


def test_the_same_library_trains_beside_tensorflow_cpu(tmp_path):
    """`tensorflow-cpu` of the same version, which has no CUDA at all."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, f"tensorflow-cpu=={tf.__version__}"], check=True, timeout=300)
    where = os.pathsep.join([str(tmp_path), str(Path(_ops.__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", TRAINS],
        env={**os.environ, "PYTHONPATH": where},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(tmp_path / "tensorflow" / "__init__.py"), *str([[0.5] * 4] * 2).split()]
    shutil.rmtree(tmp_path / "tensorflow")  # 1.3 GB
