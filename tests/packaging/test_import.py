"""What importing sok does to the process: nothing."""

import subprocess
import sys
import textwrap


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:sok", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_import_prints_nothing_and_loads_nothing_heavy():
    answer = run_python(
        """
        import os, sys
        environment = dict(os.environ)
        import sok
        assert dict(os.environ) == environment, "importing sok changed the environment"
        heavy = {"tensorflow", "keras", "tf_keras", "horovod"} & set(sys.modules)
        assert not heavy, f"importing sok imported {heavy}"
        """
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == ""
    assert answer.stderr == ""


def test_using_every_public_name_rebinds_nothing_in_tensorflow():
    answer = run_python(
        """
        import os, sys
        import tensorflow as tf
        modules = [tf, tf.nn, tf.raw_ops, tf.keras, tf.keras.layers, tf.keras.optimizers, tf.compat.v1, tf.Variable]
        before = [dict(vars(module)) for module in modules]
        environment = dict(os.environ)
        import sok
        for name in sok.__all__:
            getattr(sok, name)
        for module, names in zip(modules, before):
            # TensorFlow itself fills in lazy attributes; what was there must be the same object.
            changed = [name for name, value in names.items() if vars(module).get(name) is not value]
            assert not changed, f"{module} has other {changed}"
        assert dict(os.environ) == environment, "using sok changed the environment"
        assert "horovod" not in sys.modules, "Horovod was imported before it was needed"
        """
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == ""


def test_library_is_loaded_once_by_many_threads():
    answer = run_python(
        """
        import threading
        from sok.base import _ops
        loads = []
        load = _ops._load
        _ops._load = lambda path: (loads.append(1), load(path))[1]
        barrier = threading.Barrier(8)
        seen = []
        def use():
            barrier.wait()
            seen.append(_ops.lib())
        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(loads) == 1, loads
        assert len(seen) == 8 and len(set(map(id, seen))) == 1
        from tensorflow.python.framework import ops
        assert "Sok>TableLookup" in ops.gradient_registry._registry, "gradients are not registered"
        """
    )
    assert answer.returncode == 0, answer.stderr
