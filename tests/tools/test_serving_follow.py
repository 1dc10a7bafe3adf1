"""`sok serve` takes up the versions of a follower while it answers: each answer is of one save, and none fails."""

import itertools
import threading

import pytest
import tensorflow as tf

import sok
from sok.tools.serving.metrics import Metrics
from sok.tools.serving.models import Models
from tests.sok.feed_cases import Served, export, new_table
from tests.tools.conftest import LIMITS
from tests.tools.served_models import Client
from tests.tools.test_serving_swap import wait_for

URL = "/v1/models/ctr:predict"
PUBLISHED, CLIENTS = 12, 3


@pytest.mark.parametrize("max_to_keep", [1, 3])
def test_versions_that_follow_are_taken_up_without_a_failed_request(serve, tmp_path, max_to_keep):
    sok.Init()
    table = new_table(f"served_and_followed_{max_to_keep}")
    model = Served(table)

    def publish(value):
        table.assign([7], [[value] * 3])
        model.shift.assign(-3 * value)  # the score is 0
        publisher.publish()

    publisher = sok.Publisher(tmp_path / "feed", model)
    publish(1.0)
    export(model, tmp_path / "ctr" / "1")
    follower = sok.follow_export(tmp_path / "feed", tmp_path / "ctr", max_to_keep=max_to_keep)
    follower.poll()
    metrics = Metrics()
    models = Models(2, 0.02, metrics)
    models.add("ctr", str(tmp_path / "ctr"))
    stop, wrong, seen = threading.Event(), [], [[] for _ in range(CLIENTS)]

    def asks(number, port):
        client = Client(port)
        while not stop.is_set():
            status, told = client.ask("POST", URL, {"instances": [[7, 8]]})
            if status != 200:
                wrong.append((status, told))
                return
            (answer,) = told["predictions"]
            value = answer["rows_0"][0][0]
            if answer["score"][0] != [0.0] or answer["rows_0"][0] != [value] * 3:
                wrong.append(answer)
            seen[number].append(value)

    with serve(models, metrics, LIMITS) as port:
        clients = [threading.Thread(target=asks, args=(number, port)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        for value in range(2, PUBLISHED + 2):
            publish(float(value))
            assert follower.poll() is not None
        wait_for(lambda: wrong or all(one and one[-1] == PUBLISHED + 1 for one in seen), 60)
        stop.set()
        for client in clients:
            client.join(30)
    assert models.close(30)
    assert wrong == []
    for one in seen:  # never back to an older one
        assert all(before <= after for before, after in itertools.pairwise(one)) and len(set(one)) > 1
    kept = sorted(int(path.name) for path in (tmp_path / "ctr").iterdir())
    assert kept[-max_to_keep:] == list(range(PUBLISHED + 3 - max_to_keep, PUBLISHED + 3))
    assert tf.saved_model.contains_saved_model(str(tmp_path / "ctr" / str(kept[-1])))
