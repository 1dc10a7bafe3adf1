"""What stands between a caller and the kernels: contexts of threads and streams, and where kernels may write."""

import ctypes
import gc
import threading
import weakref

import numpy as np
import pytest


def test_scratch_goes_with_its_thread(cuda):
    import sok.cuda
    from sok.cuda import _native

    left = []

    def work():
        sok.cuda.unique(cuda.put(np.arange(1000)))
        left.extend(weakref.ref(context) for context in _native._contexts.of_stream.values())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert len(left) == 3 and [context() for context in left] == [None] * 3


def test_the_stream_that_each_thread_has_is_refused(cuda):
    from sok.cuda import _native

    made = ctypes.c_void_p()
    with pytest.raises(ValueError, match="per-thread default stream.*cupy.cuda.Stream"):
        _native.check(_native.library().sok_cuda_context_create(ctypes.c_void_p(2), ctypes.byref(made)))
    assert not made


def test_kernels_report_only_into_words_that_are_right(cuda):
    import sok.cuda

    rows = cuda.put(np.ones((2, 3), np.float32))
    ids = cuda.put(np.array([0, 1]))
    addends = [sok.cuda.Addends(ids, rows)] * 2
    calls = {
        1: [
            lambda bad: sok.cuda.unsorted_segment_sum(rows, ids, 2, first_bad=bad),
            lambda bad: sok.cuda.update_rows(
                "sgd", [1.0], [sok.cuda.Records(rows, 3)], ids, rows, nonfinite="raise", first_bad=bad
            ),
            lambda bad: sok.cuda.check(bad, ids),
        ],
        2: [lambda bad: sok.cuda.sum_rows(addends, [2], first_bad=bad)],
    }
    for n, all_of_n in calls.items():
        wrong = [
            (TypeError, np.full(n, -1, np.int64), "`first_bad` must be of uint64"),
            (ValueError, np.zeros(n + 1, np.uint64), r"`first_bad` must have shape \[" + str(n)),
            (ValueError, np.zeros((n, 1), np.uint64), "`first_bad` must have shape"),
        ]
        for call in all_of_n:
            for error, bad, message in wrong:
                with pytest.raises(error, match=message):
                    call(cuda.put(bad))
    apart = cuda.put(np.full(4, 2**64 - 1, np.uint64))[::2]
    with pytest.raises(ValueError, match="`first_bad` must be contiguous"):
        sok.cuda.sum_rows(addends, [2], first_bad=apart)
