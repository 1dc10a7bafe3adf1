"""`sok.plan`: costs worked out by hand, the best of all plans, limits, and what is refused."""

import dataclasses
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import sok
from sok.planning import machine as machines
from sok.planning import showing
from sok.planning.costs import ANSWERS, KEYS, MEMORY, Job, loads
from sok.planning.distinct import expected_distinct
from sok.planning.machine import Link, Machine
from sok.planning.planner import DoesNotFit, plan
from sok.planning.tables import Model, Table, model_of
from sok.planning.where import KINDS, Where, pinned

# Every constant a power of ten, so that a reader can follow.
ROUND = Machine(
    **{"name": "round", "source": "made up", "gather": {64: 1e9}, "update": {64: 1e8}, "stream": 1e10},
    **{
        "unique": 1e7,
        "probe": 1e8,
        "flops": 1e12,
        "copied": 1e7,
        "per_table": 0.0,
        "per_piece": 0.0,
        "per_step": 0.0,
        "memory": 10**9,
    },
    **{"within": Link(1e-3, 1e9), "between": Link(1e-2, 1e8)},
    **{"all_reduce_within": Link(1e-3, 1e9), "all_reduce_between": Link(1e-2, 1e8)},
)
FILE = "benchmarks/synthetic_models.json"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs/planning.md"


def uniform(rows, dim=16, **others):
    return Table(rows, dim, skew=0.0, **others)


@pytest.mark.parametrize(
    ("ids", "rows", "skew"), [(100, 1000, 0.0), (5000, 300, 1.0), (20_000, 50_000, 1.05), (9, 1, 2.0)]
)
def test_distinct_keys_are_those_of_drawn_batches(ids, rows, skew):
    random, g = np.random.default_rng(0), 1 - skew
    u = random.random((40, ids))
    x = (rows + 1) ** u if g == 0 else (u * ((rows + 1) ** g - 1) + 1) ** (1 / g)
    keys = random.integers(rows, size=(40, ids)) if skew == 0 else np.floor(x).astype(int)
    drawn = [len(np.unique(batch)) for batch in keys]
    assert expected_distinct(ids, rows, skew) == pytest.approx(np.mean(drawn), rel=0.01)


def test_no_ids_have_no_keys():
    assert expected_distinct(0, 10, 1.0) == 0


def test_a_measured_share_of_distinct_keys_counts():
    # 1,000 samples of 2 ids had 500 different keys: as many as there, and fewer of fewer samples.
    table = uniform(10_000, hotness=[2], distinct=0.25)
    assert table.distinct_keys(1000, 1000) == pytest.approx(500)
    assert 100 < table.distinct_keys(500, 1000) < 500


def test_the_cost_of_one_table_is_what_its_bytes_and_operations_take():
    # Two ranks, 1,000 samples each, of one id; so many rows that all keys differ. A row: 64 bytes, with Adagrad 128.
    job = Job(dataclasses.replace(ROUND, update={128: 1e8}), workers=2, hosts=1, batch=2000)
    found = loads(uniform(10**12), "table_wise", (16,), job)
    u, v = expected_distinct(1000, 10**12, 0.0), expected_distinct(2000, 10**12, 0.0)
    assert (u, v) == (pytest.approx(1000), pytest.approx(2000))
    assert found.way == "rows"
    keys, answers, gradients, serve, update, memory = found.owners[:, 0]
    assert keys == pytest.approx(8 * 1000)
    assert answers == gradients == pytest.approx(64 * 1000)
    assert serve == pytest.approx(2000 * 64 / 1e9)
    # Gradients are added at 1e10 bytes and 1e8 keys a second; a record is read and written.
    assert update == pytest.approx(2000 * 64 / 1e10 + 2000 / 1e8 + 2 * 2000 * 128 / 1e8)
    assert memory == pytest.approx(10**12 * 128 + 2 * (8000 + 2 * 64_000))
    assert found.route == pytest.approx(1000 / 1e7)
    assert found.combine == pytest.approx(2 * 1000 * 64 / 1e10)


def test_the_step_is_the_sum_of_what_the_slowest_ranks_take():
    job = Job(dataclasses.replace(ROUND, update={128: 1e8}), workers=2, hosts=1, batch=2000)
    found = loads(uniform(10**9), "table_wise", (16,), job)
    keys, answers, _, serve, update, _ = found.owners[:, 0]
    made = plan([uniform(10**9)], 2, batch=2000, machine=job.machine, strategy="table_wise", memory=10**15)
    exchanged = keys / 1e9 + 2 * answers / 1e9 + 3 * 1e-3
    assert made.step_ms == pytest.approx(1e3 * (found.route + exchanged + serve + update + 2 * found.combine))
    owner, other = made.ranks
    # Keys come in, rows go out, gradients come in.
    assert owner.bytes_in == pytest.approx(keys + answers, abs=2) and owner.bytes_out == pytest.approx(answers, abs=2)
    assert (other.bytes_in, other.bytes_out) == (owner.bytes_out, owner.bytes_in)
    assert owner.bound_by == "update" and sum(made.phases.values()) == pytest.approx(made.step_ms)


def test_ids_of_the_whole_batch_are_not_exchanged():
    made = plan([uniform(10**6)] * 2, 2, batch=2000, machine=ROUND, dp_input=False)
    assert made.phases["key exchange"] == 0
    assert {table.where.kind for table in made.tables} <= {"table_wise", "column_wise"}
    with pytest.raises(ValueError, match="row_wise: dp_input=False needs owners"):
        plan([uniform(10)], 2, machine=ROUND, dp_input=False, strategy="row_wise")


def test_bytes_between_hosts_take_the_slower_link():
    # Of 3 peers one is on the same host.
    job = Job(ROUND, workers=4, hosts=2, batch=100)
    assert job.per_byte == pytest.approx((1e-9 + 2 * 1e-8) / 3)
    assert job.latency == 1e-2 and job.reduce_latency == 1e-2


def test_many_ids_of_a_sample_are_answered_by_sums():
    job = Job(ROUND, workers=2, hosts=1, batch=2000)
    assert loads(uniform(10**9, hotness=[50]), "table_wise", (16,), job).way == "sums"
    assert loads(uniform(10**9, hotness=[50], pooled=False), "table_wise", (16,), job).way == "rows"
    assert loads(uniform(10, hotness=[50]), "table_wise", (16,), job).way == "rows"


def test_a_small_table_that_all_read_is_copied():
    slow = dataclasses.replace(ROUND, within=Link(1e-3, 1e6))
    made = plan([uniform(10, 4, hotness=[1] * 5)], 2, batch=10**5, machine=slow)
    assert made.tables[0].where.kind == "data_parallel" and made.tables[0].way == "local"


@pytest.mark.parametrize("workers, hosts", [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_the_plan_of_few_tables_is_the_best_of_all(workers, hosts):
    tables = [uniform(10**5, 16, hotness=[h]) for h in ((1, 4, 9) if hosts == 1 else (4, 9))]
    made = plan(tables, workers, hosts=hosts, batch=3000, machine=ROUND)
    assert made.is_exact and made.bound_ms == made.step_ms
    pins = ["row_wise", "data_parallel", *(f"table_wise({rank})" for rank in range(workers)), "column_wise(2)"]
    pins = pins if workers > 1 else pins[:-1]
    pins += [f"table_row_wise({host})" for host in range(hosts) if hosts > 1]
    names = [f"table_{i}" for i in range(len(tables))]
    for chosen in itertools.product(pins, repeat=len(tables)):
        pin = dict(zip(names, chosen, strict=True))
        other = plan(tables, workers, hosts=hosts, batch=3000, machine=ROUND, pin=pin)
        assert made.step_ms <= other.step_ms * (1 + 1e-9)


def test_rows_over_a_host_are_fewer_answers_than_over_all():
    # Of 20 ids of a sample all owners have some: by sums each owner answers each sample.
    table, job = uniform(10**6, 16, hotness=[20]), Job(ROUND, workers=8, hosts=4, batch=8000, way_home="sums")
    of_all, of_host = (loads(table, kind, (16,), job).owners for kind in ("row_wise", "table_row_wise"))
    assert of_all.shape == (6, 1) and of_host.shape == (6, 2)
    touched = [1 - (1 - 1 / ranks) ** 20 for ranks in (8, 2)]
    np.testing.assert_allclose(of_all[ANSWERS], 64 * 1000 * touched[0])
    np.testing.assert_allclose(of_host[ANSWERS], 64 * 1000 * touched[1])
    np.testing.assert_allclose(of_host[KEYS], 8 * 1000 * (10 + touched[1]))


def test_a_table_too_large_for_a_rank_is_spread_over_the_freer_host():
    pin = {"table_0": "table_row_wise(0)", "table_1": "table_row_wise"}
    made = plan([uniform(10**5), uniform(10**5, hashed=True)], 8, hosts=2, batch=800, machine=ROUND, pin=pin)
    wheres = [table.where for table in made.tables]
    assert wheres[0] == Where("table_row_wise", owners=(0, 1, 2, 3), hosts=2)
    assert wheres[1] == Where("table_row_wise", owners=(4, 5, 6, 7), hash=True, hosts=2)
    assert str(wheres[1]) == "table_row_wise(1, hosts=2, hash=True)"
    assert [rank.memory for rank in made.ranks[:4]] == [made.ranks[0].memory] * 4
    limit = max(rank.memory for rank in made.ranks)
    with pytest.raises(DoesNotFit, match="has no room beside the others") as refused:
        both = dict.fromkeys(pin, "table_row_wise(1)")
        plan([uniform(10**5), uniform(10**5)], 8, hosts=2, batch=800, machine=ROUND, pin=both, memory=limit)
    assert 0 < refused.value.shortfall < limit


@pytest.mark.parametrize("arguments, why", [({}, "there is one host"), ({"hosts": 4}, "a host has one worker")])
def test_hosts_that_are_none_have_no_rows_to_share(arguments, why):
    with pytest.raises(ValueError, match=f"table_row_wise: {why}"):
        plan([uniform(10)], 4, machine=ROUND, pin={"table_0": "table_row_wise"}, **arguments)
    with pytest.raises(ValueError, match="cannot be on host 2 of 2"):
        plan([uniform(10)], 4, hosts=2, machine=ROUND, pin={"table_0": "table_row_wise(2)"})


def test_copies_of_hashed_tables_travel_with_the_others():
    # Each rank sends its 63.2 different keys to both, gets a row of each from itself, and sends a gradient to both.
    table = uniform(100, 16, hotness=[1], hashed=True, pooled=False)
    made = plan([table], 2, batch=200, machine=ROUND, strategy="data_parallel")
    assert made.tables[0].where.kind == "data_parallel" and made.tables[0].way == "rows"
    distinct = 100 * (1 - 0.99**100)
    # Headers: 7 words, and 3 counts of each of two copies; 16 floats. One goes to each rank.
    keys, answers = 2 * 8 * (7 + 2 * 3), 2 * 4 * 16
    sent = {"keys": 16 * distinct + keys, "rows": 64 * distinct + answers, "grads": 128 * distinct + answers}
    for rank in made.ranks:
        assert rank.handed == pytest.approx(sent)
        # From the other rank: keys and gradients.
        assert rank.bytes_in == rank.bytes_out == int((8 + 64) * distinct)


@pytest.mark.parametrize("model", ["tiny", "criteo"])
@pytest.mark.parametrize("strategy", ["row_wise", "table_wise", "memory_balanced"])
def test_no_plain_strategy_is_faster(model, strategy):
    best = plan(FILE, 8, machine="a100", model=model)
    assert best.bound_ms <= best.step_ms <= plan(FILE, 8, machine="a100", model=model, strategy=strategy).step_ms


def test_the_same_question_has_the_same_answer():
    first, second = (plan(FILE, 4, machine="h100", model="tiny").as_dict() for _ in range(2))
    assert json.dumps(first) == json.dumps(second)


def test_pins_and_forbidden_kinds_are_kept():
    made = plan(
        [uniform(10**5)] * 4, 4, batch=4000, machine=ROUND,
        pin={"table_0": "table_wise(3)", "table_1": "column_wise(4)"}, forbid=["table_wise", "column_wise"],
    )  # fmt: skip
    wheres = [table.where for table in made.tables]
    assert wheres[0] == Where("table_wise", owners=(3,))
    assert wheres[1].widths == (4, 4, 4, 4) and sorted(wheres[1].owners) == [0, 1, 2, 3]
    assert {where.kind for where in wheres[2:]} <= {"row_wise", "data_parallel"}
    assert [table.reason for table in made.tables[:2]] == ["pinned", "pinned"]


@pytest.mark.parametrize(
    ("where", "placement"),
    [
        (Where("row_wise"), sok.row_wise()),
        (Where("row_wise", hash=True), sok.row_wise(hash=True)),
        (Where("table_wise", owners=(3,)), sok.table_wise(3)),
        (Where("column_wise", owners=(2, 0), widths=(5, 3)), sok.column_wise([5, 3], owners=[2, 0])),
        (Where("data_parallel"), sok.data_parallel()),
        (Where("table_row_wise", owners=(2, 3), hosts=4), sok.table_row_wise(1, hosts=4)),
        (Where("table_row_wise", owners=(0, 1), hash=True, hosts=2), sok.table_row_wise(0, hosts=2, hash=True)),
    ],
)
def test_what_is_planned_is_a_placement_of_tables(where, placement):
    assert where.placement() == placement


def test_rules_of_whole_rows_are_not_cut():
    made = plan([uniform(10**6, 64)], 4, machine=ROUND, optimizer="rowwise_adagrad", memory=10**12)
    assert made.tables[0].where.kind != "column_wise"
    with pytest.raises(ValueError, match="column_wise: rowwise_adagrad needs whole rows"):
        plan([uniform(10)], 4, machine=ROUND, optimizer="rowwise_adagrad", pin={"table_0": "column_wise"})


def test_what_does_not_fit_says_how_many_bytes_are_missing():
    tables = [uniform(1000)]
    fits = plan(tables, 2, batch=2, machine=ROUND, strategy="row_wise")
    needed = max(rank.memory for rank in fits.ranks)
    plan(tables, 2, batch=2, machine=ROUND, strategy="row_wise", memory=needed + 1)
    with pytest.raises(DoesNotFit, match="bytes are missing") as refused:
        plan(tables, 2, batch=2, machine=ROUND, strategy="row_wise", memory=needed - 1000)
    assert 999 <= refused.value.shortfall <= 2 * 1002
    with pytest.raises(DoesNotFit, match=r"by basic, the fullest rank needs .* bytes are missing"):
        plan(tables, 1, batch=2, machine=ROUND, strategy="basic", memory=1000)


def test_a_table_without_room_beside_others_is_named():
    # Together they would fit, but two of three share a rank.
    big = plan([uniform(1000)], 1, batch=2, machine=ROUND, strategy="table_wise").ranks[0].memory
    with pytest.raises(DoesNotFit, match=r"table 'table_\d' has no room beside the others") as refused:
        plan([uniform(1000)] * 3, 2, batch=2, machine=ROUND, strategy="table_wise", memory=int(1.6 * big))
    assert 0 < refused.value.shortfall < big


def test_memory_is_kept_where_the_fastest_plan_would_not_fit():
    free = plan([uniform(10**5)] * 2, 2, batch=10**5, machine=ROUND, forbid=["row_wise"])
    tight = max(rank.memory for rank in free.ranks) // 2 + 10**6
    made = plan([uniform(10**5)] * 2, 2, batch=10, machine=ROUND, memory=tight)
    assert max(rank.memory for rank in made.ranks) <= tight


def test_two_thousand_tables_on_many_ranks_are_planned_in_time():
    tables = [Table(10 ** (2 + i % 6), 8 * 2 ** (i % 4), hotness=[1 + i % 7]) for i in range(2000)]
    made = plan(tables, 128, hosts=16, machine="a100")
    assert len(made.tables) == 2000 and made.step_ms >= made.bound_ms


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 64), st.integers(1, 20)), min_size=1, max_size=12),
    st.sampled_from([(1, 1), (2, 1), (5, 1), (6, 3)]),
)
def test_every_plan_places_every_table_whole(shapes, ranks):
    workers, hosts = ranks
    tables = [Table(rows, dim, hotness=[ids]) for rows, dim, ids in shapes]
    made = plan(tables, workers, hosts=hosts, batch=600, machine="cpu_2_cores")
    assert made.bound_ms <= made.step_ms * (1 + 1e-9)
    for table, found in zip(tables, made.tables, strict=True):
        where = found.where
        assert all(0 <= owner < workers for owner in where.owners)
        assert where.kind != "column_wise" or (
            sum(where.widths) == table.dim and len(where.owners) == len(where.widths)
        )
        assert where.kind != "table_wise" or len(where.owners) == 1


def test_descriptions_are_printed():
    assert Where("column_wise", (0, 1), (2, 2)).as_dict() == {"kind": "column_wise", "owners": [0, 1], "widths": [2, 2]}
    assert Where("column_wise", tuple(range(8)), (1,) * 8).words == "column_wise(8 on 0,1,2,3,..)"
    assert str(Where("column_wise", (0, 1), (2, 2))) == "column_wise((2, 2), owners=(0, 1))"


def test_hashed_tables_are_spread_by_hash():
    made = plan([uniform(10**6, hashed=True)], 2, machine=ROUND, strategy="row_wise")
    assert made.tables[0].where == Where("row_wise", hash=True)


def test_a_keras_model_is_planned_with_its_dense_part():
    ids = tf.keras.Input([2], dtype="int64")
    rows = tf.keras.layers.Embedding(100, 8, name="of_ids")(ids)
    model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(rows)))
    found = model_of(model)
    assert [(t.name, t.rows, t.dim, t.pooled) for t in found.tables] == [("of_ids", 100, 8, False)]
    assert found.dense_parameters == 17
    assert plan(model.layers[1:2], 2, machine=ROUND).tables[0].name == "of_ids"


def test_files_of_merlins_models_have_their_dense_part():
    found = model_of(FILE, "tiny")
    assert (len(found.tables), sum(table.features for table in found.tables)) == (55, 58)
    assert found.dense_parameters == 207_873
    stride = {"tables": [{"rows": 5, "dim": 10}], "mlp_sizes": [3], "interact_stride": 4, "num_numerical_features": 1}
    assert model_of(stride).dense_parameters == (3 + 1 + 1) * 3 + 4
    assert model_of({"tables": [{"rows": 5, "dim": 10}], "dense_parameters": 7}).dense_parameters == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "`workers` must be a multiple of `hosts`, both at least 1. Received: 0 on 1"),
        ({"hosts": 2, "workers": 3}, "Received: 3 on 2"),
        ({"batch": 0}, "`batch` must be at least 1"),
        ({"optimizer": "best"}, "`optimizer` must be one of sgd, .* Received: 'best'"),
        ({"way_home": "walk"}, "`way_home` must be 'auto', 'rows' or 'sums'"),
        ({"strategy": "best"}, "`strategy` must be 'auto' or one of row_wise, .*: 'best'"),
        ({"forbid": ["best"]}, "`forbid` must be some of row_wise, .* Received: 'best'"),
        ({"forbid": list(KINDS)}, r"no placement left \(all kinds"),
        ({"pin": {"other": "row_wise"}}, "`pin` names no table of the model: 'other'. There are: table_0"),
        ({"pin": {"table_0": "row_wise(1)"}}, "a pin must be row_wise, .* Received: row_wise"),
        ({"pin": {"table_0": "table_wise(2)"}}, "cannot be on rank 2 of 2"),
        ({"pin": {"table_0": "column_wise(3)"}}, "can have 1 to 2 pieces"),
        ({"tables": [uniform(4, 1)], "strategy": "column_wise"}, "column_wise: it has one column"),
        ({"tables": 3}, "`tables` must be tables, layers, a Keras model or a JSON file"),
        ({"tables": [3]}, "a table must be a `Table`, a dict or an Embedding layer"),
        ({"tables": [{"rows": 3}]}, "has no 'dim'"),
        ({"tables": [{"rows": 3, "dim": 1, "age": 2}]}, "has 'age', which is not known"),
        ({"tables": {"rows": 3}}, "a JSON file must have `tables`, a list, or `models`"),
        ({"tables": "missing.json"}, "missing.json cannot be read as JSON"),
        ({"tables": FILE}, "`model` must be one of tiny, small, .*criteo. Received: None"),
        ({"tables": [{"rows": 0, "dim": 1}]}, "`rows` of table '' must be at least 1: 0"),
        ({"tables": [{"rows": 1, "dim": 1, "hotness": [-1]}]}, "`hotness` of table '' must be at least 0"),
        ({"tables": [{"rows": 1, "dim": 1, "skew": -1}]}, "`skew` of table '' must be at least 0"),
        ({"tables": [{"rows": 1, "dim": 1, "distinct": 2}]}, r"`distinct` of table '' must be in \(0, 1\] or None: 2"),
        ({"tables": [{"rows": 1, "dim": 1, "name": "a"}] * 2}, "More than one is called 'a'"),
        ({"machine": "none"}, "`machine` must be a file or one of a100, cpu_2_cores, h100"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(arguments, message):
    asked = {"tables": [uniform(10, 2)], "workers": 2, "machine": ROUND, **arguments}
    with pytest.raises(ValueError, match=message):
        plan(asked.pop("tables"), asked.pop("workers"), **asked)


def test_a_model_without_embeddings_is_refused():
    with pytest.raises(ValueError, match="has no layer with `input_dim` and `output_dim`"):
        model_of(tf.keras.Sequential([tf.keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="has no `input_dim`: say by a `Table`"):
        model_of([sok.Embedding(None, 4, name="any")])


def test_pins_name_kinds_and_numbers():
    assert pinned("column_wise( 4 )") == ("column_wise", 4)
    assert pinned("row_wise()") == ("row_wise", None)


def test_machines_go_through_files(tmp_path, monkeypatch):
    path = tmp_path / "cache" / "machine.json"
    machines.save(ROUND, path)
    assert machines.load(path) == ROUND and hash(ROUND) == hash(machines.load(path))
    monkeypatch.setenv("SOK_MACHINE", str(path))
    assert machines.load() == ROUND
    monkeypatch.setenv("SOK_MACHINE", str(tmp_path / "none"))
    assert machines.load() == machines.load(machines.DEFAULT)
    monkeypatch.delenv("SOK_MACHINE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machines.measured_path() == tmp_path / "sok" / "machine.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stream": 0}, "'stream' must be above 0. It is: 0"),
        ({"gather": {}}, "'gather' must have rates above 0"),
        ({"colour": 1}, "has unknown 'colour'"),
        ({"stream": None}, "lacks 'stream'"),
        ({"within": {"latency": -1, "bandwidth": 1}}, "a link must have a latency of 0 s or more"),
    ],
)
def test_files_of_machines_are_checked(changes, message):
    content = {name: value for name, value in (ROUND.as_dict() | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        machines.from_dict(content)


@pytest.mark.parametrize("name", machines.shipped())
def test_shipped_machines_say_their_source(name):
    machine = machines.load(name)
    assert len(machine.source) > 40 and machine.memory > 10**9
    assert ("published" in machine.source.lower()) == (name != "cpu_2_cores")


def test_rates_between_two_sizes_lie_between_theirs():
    machine = dataclasses.replace(ROUND, gather={100: 1.0, 200: 3.0})
    assert [machine.gather_rate(n) for n in (50, 100, 150, 200, 500)] == [1, 1, 2, 3, 3]


def test_a_plan_is_shown_with_its_ranks_tables_and_reasons():
    made = plan(
        Model((uniform(10**5, name="<user>"), *(uniform(10, name=f"t{i}") for i in range(20)))), 2, machine=ROUND
    )
    text = str(made)
    assert "21 tables on 2 workers of 1 host, batch 65,536, adagrad, strategy auto" in text
    assert "and 9 more tables, all of them smaller" in text and "<user>" in text
    assert len(showing.as_text(made, 100).splitlines()) > len(text.splitlines())
    page = showing.as_html(made)
    assert "&lt;user&gt;" in page and "<user>" not in page
    assert page.count("<rect") == 2 * len(made.phases) + 2 and "data-y" not in page


def test_costs_of_owners_are_numbers_of_each_piece():
    found = loads(uniform(1000), "column_wise", (8, 4, 4), Job(ROUND, 3, 1, 300))
    assert found.owners.shape == (6, 3) and not found.everywhere
    assert found.owners[KEYS].tolist() == [found.owners[KEYS, 0]] * 3
    assert found.owners[MEMORY, 0] > found.owners[MEMORY, 1]


def test_predictions_of_the_documentation_are_those_of_today():
    rows = re.findall(r"^\| (\w+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", DOCUMENT.read_text("utf-8"), re.M)
    assert len(rows) == 14
    for model, workers, predicted, published, ratio in rows:
        made = plan(
            FILE, int(workers), hosts=max(1, int(workers) // 8), machine="a100", model=model, dp_input=False,
            strategy="memory_balanced", column_slice_threshold=1280 * 1048576 if int(workers) > 1 else None,
        )  # fmt: skip
        assert made.step_ms == pytest.approx(float(predicted), abs=0.051), (model, workers)
        assert made.step_ms / float(published) == pytest.approx(float(ratio), abs=0.01)
