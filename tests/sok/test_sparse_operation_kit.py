"""`import sparse_operation_kit as sok`: the names of `sok`, the module paths of SOK, and scripts as its users write."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok
import sparse_operation_kit
from tests.multiprocess.harness import run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = ["sok_v1_script.py", "sok_v1_session_script.py", "sok_v2_script.py", "sok_v2_session_script.py"]

# Where SOK 1.1 and 2.1 have their names, and what is there.
PATHS = {
    "core.initialize": {"Init": "Init"},
    "core.context_scope": {"OptimizerScope": "OptimizerScope"},
    "core.embedding_variable": {"EmbeddingVariable": "EmbeddingVariable"},
    "embeddings.distributed_embedding": {"DistributedEmbedding": "DistributedEmbedding"},
    "embeddings.all2all_dense_embedding": {"All2AllDenseEmbedding": "All2AllDenseEmbedding"},
    "embeddings.get_embedding_op": {"get_embedding": "get_embedding"},
    "saver.Saver": {"Saver": "Saver"},
    "dump_load": {name: name for name in ("dump", "load")},
    "optimizers": {"Adam": "optimizers.Adam"},
    "optimizers.utils": {"split_embedding_variable_from_others": "split_embedding_variable_from_others"},
    "tf.keras.optimizers.adam": {"Adam": "tf.keras.optimizers.Adam"},
    "tf.keras.optimizers.lazy_adam": {"LazyAdamOptimizer": "optimizers.LazyAdamOptimizer"},
    "lookup": {name: name for name in ("lookup_sparse", "all2all_dense_embedding")},
    "dynamic_variable": {name: name for name in ("DynamicVariable", "assign", "export")},
    "distributed_variable": {name: name for name in ("Variable", "DistributedVariable", "LocalizedVariable")},
    "optimizer": {name: name for name in ("OptimizerWrapper", "SGD")},
    "communication": {"num_gpus": "communication.num_gpus"},
    "experiment": {
        **{name: name for name in ("Variable", "DynamicVariable", "OptimizerWrapper", "SGD", "init", "set_comm_tool")},
        **{name: name for name in ("all2all_dense_embedding", "assign", "export", "filter_variables", "communication")},
        **{name: name for name in ("dump", "load", "DistributedVariable", "LocalizedVariable")},
        **{name: name for name in ("optimizer", "dump_load")},
    },
    "experiment.communication": {"rank": "communication.rank"},
    "experiment.distributed_variable": {"LocalizedVariable": "LocalizedVariable"},
    "experiment.dynamic_variable": {name: name for name in ("DynamicVariable", "assign", "export")},
    "experiment.optimizer": {name: name for name in ("OptimizerWrapper", "SGD")},
    "experiment.dump_load": {name: name for name in ("dump", "load")},
}


def named(path):
    value = sok
    for part in path.split("."):
        value = getattr(value, part)
    return value


def test_every_public_name_is_the_same_object():
    assert len(sok.__all__) > 30
    for name in sok.__all__:
        assert getattr(sparse_operation_kit, name) is getattr(sok, name), name
        assert name in dir(sparse_operation_kit) and name in sparse_operation_kit.__all__
    with pytest.raises(AttributeError, match="module 'sparse_operation_kit' has no attribute 'Saver2'"):
        sparse_operation_kit.Saver2  # noqa: B018


@pytest.mark.parametrize("package", ["sok", "sparse_operation_kit"])
def test_attributes_that_scripts_use_are_there_after_the_import_alone(package):
    code = f"""
import {package} as sok
assert sok.lookup.lookup_sparse is sok.lookup_sparse, sok.lookup
assert sok.lookup.all2all_dense_embedding is sok.all2all_dense_embedding
assert sok.optimizer.OptimizerWrapper is sok.OptimizerWrapper and sok.optimizer.SGD is sok.SGD
assert sok.dump_load.dump is sok.dump and sok.dump_load.load is sok.load
import tensorflow as tf
assert sok.tf_version[:2] == [int(n) for n in tf.__version__.split(".")[:2]] and sok.tf_version[0] == 2
assert issubclass(sok.DistributedVariable, tf.Variable) and issubclass(sok.LocalizedVariable, tf.Variable)
kinds = [type(sok.Variable([[1.0]], mode=mode)) for mode in (None, "localized:0")]
assert kinds == [sok.DistributedVariable, sok.LocalizedVariable]
if "{package}" == "sparse_operation_kit":
    assert sok.dynamic_variable.DynamicVariable is sok.DynamicVariable
    assert sok.distributed_variable.LocalizedVariable is sok.LocalizedVariable
    assert sok.kit_lib.in_tensorflow2() is True
    tf.compat.v1.disable_v2_behavior()
    assert sok.kit_lib.in_tensorflow2() is False
"""
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr[-2000:]


@pytest.fixture
def not_imported(monkeypatch):
    """The package as in a process that has not seen it yet; `sok` stays."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "sparse_operation_kit":
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["import {0}", "import {0} as by_path", "from {1} import {2} as by_path"])
def test_names_are_where_sok_has_them(not_imported, path, form):
    whole, names = f"sparse_operation_kit.{path}", {}
    parent, _, last = whole.rpartition(".")
    exec(form.format(whole, parent, last), names)
    module = eval("by_path" if "by_path" in names else whole, names)
    for name, ours in PATHS[path].items():
        assert getattr(module, name) is named(ours), name


def test_importing_it_is_as_quiet_as_importing_sok():
    code = """
import os, sys
environment = dict(os.environ)
import sparse_operation_kit as sok
assert dict(os.environ) == environment
assert not {"tensorflow", "keras", "horovod"} & set(sys.modules)
"""
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")


def test_lookup_sparse_of_the_experiment_takes_combiners_third_or_fourth():
    from sparse_operation_kit import experiment

    matrix = np.arange(6, dtype=np.float32).reshape(3, 2)
    ids = tf.ragged.constant([[0, 2], [1]])
    (pooled,) = experiment.lookup_sparse([experiment.Variable(matrix)], [ids], ["sum"])
    np.testing.assert_array_equal(pooled, [matrix[0] + matrix[2], matrix[1]])
    weights = ids.with_values(tf.constant([1.0, 2.0, 3.0]))
    (pooled,) = experiment.lookup_sparse([experiment.Variable(matrix)], [ids], [weights], ["sum"])
    np.testing.assert_array_equal(pooled, [matrix[0] + 2 * matrix[2], 3 * matrix[1]])
    np.testing.assert_array_equal(
        experiment.lookup_sparse(experiment.Variable(matrix), ids, combiners="sum"),
        pooled * 0 + [matrix[0] + matrix[2], matrix[1]],
    )
    np.testing.assert_array_equal(experiment.lookup_sparse(experiment.Variable(matrix), ids)[0], matrix[[0, 2]].mean(0))


@pytest.mark.multiprocess
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_a_sok_user_runs_on_two_workers(script):
    job = run([sys.executable, str(HERE / script)], 2, deadline=240.0)
    assert job.returncode == 0 and not job.timed_out, job.output[-4000:]
    for rank in range(2):
        assert f"rank {rank}: the rows are those of TensorFlow" in job.output, job.output[-4000:]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_a_sok_user_runs_alone(forked, tmp_path, script):
    answer = forked.run(HERE / script, tmp_path)
    assert answer.status == 0, answer.stderr[-4000:]
    assert "rank 0: the rows are those of TensorFlow" in answer.stdout


def test_the_layer_of_tf_distribute_can_be_imported_and_is_refused():
    from sparse_operation_kit.embeddings.tf_distributed_embedding import TFDistributedEmbedding

    with pytest.raises(NotImplementedError, match="tf.distribute strategies.*Use sok.All2AllDenseEmbedding"):
        TFDistributedEmbedding(vocabulary_size=10, embedding_vec_size=4)


def test_the_name_in_the_names_of_savers_files(tmp_path):
    variable = sok.All2AllDenseEmbedding(10, 2, slot_num=1, nnz_per_slot=1).embedding_variable
    sok.Saver().dump_to_file(variable, str(tmp_path))
    assert (tmp_path / f"{variable.m_var_name}_keys.file").exists()


def test_a_mirrored_strategy_of_one_replica_looks_up_and_trains():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        layer = sok.All2AllDenseEmbedding(10, 2, slot_num=1, nnz_per_slot=1, embedding_initializer="ones")
        optimizer = sok.optimizers.SGD(0.5)

    @tf.function
    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(keys, training=True))
        (table,) = layer.trainable_variables
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return loss

    losses = [float(strategy.run(step, args=(tf.constant([[3], [3]], tf.int64),))) for _ in range(2)]
    assert losses == [4.0, 0.0]


def test_a_session_runs_the_initializer_of_an_optimizer():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        optimizer = sok.optimizers.Adam(0.5)
        session.run(optimizer.initializer)
        assert session.run(optimizer.iterations) == 0
    assert sok.optimizers.Adam(0.5).initializer is None
