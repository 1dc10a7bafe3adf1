"""Work on several streams of a device. (On the emulator's: tests/cuda, since NumPy knows no streams.)"""

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]


def test_lookups_and_updates_of_two_streams_never_meet_in_a_row():
    import cupy

    import sok.cuda

    table = sok.cuda.Table("item", dim=67, capacity=3000, initializer="constant", a=0.0)
    keys = cupy.arange(3000)
    row_ids = table.find_or_insert(keys)
    down = cupy.full((3000, 67), -1.0, cupy.float32)
    cupy.cuda.runtime.deviceSynchronize()
    reader, writer = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    seen = []
    for _ in range(30):
        with writer:
            table.apply("sgd", [1.0], row_ids, down)
        with reader:
            seen.append(table.lookup(keys, insert=False).rows)
    cupy.cuda.runtime.deviceSynchronize()
    for updates, rows in enumerate(seen, start=1):
        assert bool((rows == updates).all()), f"a lookup between update {updates} and the next"


def test_tables_on_two_streams_have_scratch_of_their_own():
    import cupy

    import sok.cuda

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    tables = [sok.cuda.Table(f"item {i}", dim=5, capacity=4000) for i in range(2)]
    found = []
    for begin in range(0, 4000, 400):
        for table, stream in zip(tables, streams, strict=True):
            with stream:
                found.append(table.find_or_insert(cupy.arange(begin, begin + 400) * 3))
    cupy.cuda.runtime.deviceSynchronize()
    for call, row_ids in enumerate(found):
        begin = 400 * (call // 2)
        assert row_ids.tolist() == list(range(begin, begin + 400))
