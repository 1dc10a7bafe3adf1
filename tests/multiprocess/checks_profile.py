"""`sok.profile` on several ranks: a file each, with the exchange between what runs on this rank."""

import json
from pathlib import Path

import tensorflow as tf

import sok

STEPS = 3


def check_each_rank_writes_a_file_with_its_exchanges(world, tmp_path_of_rank):
    layer = sok.DistributedEmbedding("sum", 1000, 8, slot_num=2, max_nnz=3, name="profiled")
    optimizer = sok.optimizers.SGD(0.1)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(ids) ** 2)
        variable = layer.embedding_variable
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
        return loss

    ids = tf.reshape(tf.range(30, dtype=tf.int64), [5, 2, 3])
    step(ids)  # traced before the profile
    with sok.profile(tmp_path_of_rank / "t.json") as p, sok.trace() as counted:
        for _ in range(STEPS):
            step(ids)
    assert Path(p.path).name == f"t.rank{world.rank}.json"
    events = json.loads(Path(p.path).read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {world.rank}

    ends = {event["id2"]["local"]: event for event in events if event["ph"] == "e"}
    exchanges = []
    for begin in (event for event in events if event["ph"] == "b"):
        end = ends.pop(begin["id2"]["local"])
        assert begin["name"] == end["name"] == "exchange" and begin["ts"] < end["ts"] < begin["ts"] + 600e6
        assert begin["args"]["table"] == layer.embedding_variable.table_name
        exchanges.append((begin["args"]["step"], begin["args"]["collective"].split("/")[2], begin["args"]["bytes"]))
    assert not ends and len(exchanges) == counted.collectives == 3 * STEPS
    assert sum(num_bytes for _, _, num_bytes in exchanges) == counted.bytes
    assert sorted(e[:2] for e in exchanges) == [(n, what) for n in range(STEPS) for what in ("grads", "keys", "rows")]

    spans = sorted((event["args"]["step"], event["name"]) for event in events if event["ph"] == "X")
    # Backward twice: this rank's gradients into a message, and the peers' messages into rows.
    expected = ("backward", "backward", "combine", "find", "route", "update")
    assert spans == [(n, what) for n in range(STEPS) for what in expected]
    # One after the other, on whatever threads.
    first = sorted((e["ts"], e["name"]) for e in events if e["ph"] in "Xb" and e["args"]["step"] == 0)
    order = ["route", "exchange", "find", "exchange", "combine", "backward", "exchange", "backward", "update"]
    assert [name for _, name in first] == order
