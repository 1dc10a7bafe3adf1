"""Arrays of other libraries: taken as they are, refused with words, waited for, and kept until the device is done."""

import ctypes
import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.contracts.foreign import Interface, Old, Stream, Tensor, memory_of, pinned
from tests.messages import saying

WAYS = {
    "interface": Interface,
    "interface, version 2": lambda x: Interface(x, version=2, strides=x.strides),
    "DLPack": Tensor,
    "DLPack without a version": lambda x: Tensor(x, version=None),
    "DLPack with strides": lambda x: Tensor(x, strides=[s // x.itemsize for s in x.strides]),
    "DLPack from before versions": Old,
    "DLPack, managed memory": lambda x: Tensor(x, device=(13, 0)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_arrays_of_another_library_is_that_of_our_own(cuda, rng, way):
    import sok.cuda

    keys, grad = rng.integers(0, 40, 100), rng.normal(size=(50, 3)).astype(np.float32)
    splits = np.arange(0, 101, 2)

    def step(foreign):
        def give(x):
            return foreign(cuda.put(x))

        table = sok.cuda.Table("item", dim=3, capacity=64, seed=5)
        ids = table.find_or_insert(give(keys.astype(np.int32)))
        rows = table.lookup(give(keys), insert=False).rows
        pooled = sok.cuda.combine(foreign(rows), foreign(ids), give(splits), combiner="mean")
        addends = [sok.cuda.Addends(foreign(ids), give(grad), row_splits=give(splits), combiner="mean")]
        sums = sok.cuda.TableGroup([table]).sum_rows(addends)[0]
        table.apply("sgd", [0.5], *map(foreign, sums[:2]), num_grads=foreign(sums.num_grads))
        records, bad = cuda.put(np.ones((40, 3), np.float32)), cuda.put(np.full(1, 2**64 - 1, np.uint64))
        whole = sok.cuda.sum_rows(addends, [40], first_bad=foreign(bad))
        given = [foreign(x) for x in (whole.row_ids, whole.sums)]
        tables = [sok.cuda.Records(foreign(records), 3)]
        sok.cuda.update_rows("sgd", [0.5], tables, *given, num_grads=foreign(whole.num_sums), first_bad=foreign(bad))
        outside = sok.cuda.unsorted_segment_sum(give(grad), give(np.full(50, 9)), 4, first_bad=foreign(bad))
        return [cuda.get(x) for x in (pooled, table.lookup(give(keys), insert=False).rows, records, outside, bad)]

    ours = step(lambda x: x)
    assert (ours[2] != 1).any() and ours[4][0] == 0, "nothing was written, so that nothing is seen"
    for got, expected in zip(step(WAYS[way]), ours, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("foreign", [Interface, Tensor])
def test_no_keys_have_no_memory(cuda, foreign):
    import sok.cuda

    said = {"data": (0, False)} if foreign is Interface else {"data": None}
    nothing = foreign(cuda.put(np.zeros(0, np.int32)), **said)
    found = sok.cuda.unique(nothing)
    assert [len(cuda.get(x)) for x in found] == [0, 0, 0] and found.keys.dtype == np.int32


def test_bfloat16_comes_by_dlpack(cuda):
    import sok.cuda

    words = cuda.put(np.array([[0x3F80, 0x4000]] * 2, np.uint16))  # 1, 2
    ids = cuda.put(np.zeros(2, np.int64))
    sums = sok.cuda.unsorted_segment_sum(Tensor(words, dtype=(4, 16, 1)), ids, 1)
    np.testing.assert_array_equal(cuda.get(sums), [[2, 4]])
    with pytest.raises(TypeError, match=saying("`row_ids`", "Received: bfloat16")):
        sok.cuda.check(None, Tensor(words[0], dtype=(4, 16, 1)))


class Refusing(Tensor):
    def __dlpack__(self, **_):
        raise BufferError("it requires a gradient. Use x.detach()")


class Repeating(Tensor):
    """Gives the same capsule every time."""

    def __dlpack__(self, **asked):
        self.capsule = getattr(self, "capsule", None) or super().__dlpack__(**asked)
        return self.capsule


def twice(x):
    import sok.cuda

    tensor = Repeating(x)
    sok.cuda.unique(tensor)
    return tensor


REFUSED = {
    "NumPy's": (np.asarray, TypeError, ["memory of the host", "cupy.asarray", "x.cuda()"]),
    "list": (lambda x: [1, 2], TypeError, ["<class 'list'>", "memory of the host"]),
    "CPU": (lambda x: Tensor(x, device=(1, 0)), TypeError, ["memory of the host", "cupy.asarray"]),
    "pinned": (lambda x: Tensor(x, device=(3, 0)), TypeError, ["memory of the host"]),
    "ROCm": (lambda x: Tensor(x, device=(10, 0)), TypeError, ["a CUDA device", "kind 10"]),
    "device 1": (lambda x: Tensor(x, device=(2, 1)), ValueError, ["which is 0", "on device 1", "cupy.cuda.Device(1)"]),
    "two devices": (lambda x: Tensor(x, tensor_device=(2, 1)), ValueError, ["(2, 0)", "(2, 1)"]),
    "version 2.0": (lambda x: Tensor(x, version=(2, 0)), TypeError, ["version 2.0", "max_version"]),
    "refusing": (Refusing, TypeError, ["Refusing", "x.detach()"]),
    "used": (twice, TypeError, ["a capsule that nobody has used", "used_dltensor"]),
    "4 lanes": (lambda x: Tensor(x, dtype=(0, 16, 4)), TypeError, ["16 bits", "4 lanes"]),
    "float8": (lambda x: Tensor(x, dtype=(7, 8, 1)), TypeError, ["code 7"]),
    "int4": (lambda x: Tensor(x, dtype=(0, 4, 1)), TypeError, ["4 bits"]),
    "int128": (lambda x: Tensor(x, dtype=(0, 128, 1)), TypeError, ["128 bits"]),
    "float64": (lambda x: Tensor(x, dtype=(2, 64, 1)), TypeError, ["of int64 or", "Received: float64"]),
    "a number": (lambda x: Tensor(x, shape=()), ValueError, ["shape [?]", "Received: []"]),
    "negative": (lambda x: Tensor(x, shape=(-1,)), ValueError, ["must have a shape", "[-1]"]),
    "too much": (lambda x: Tensor(x, shape=(2**62,)), ValueError, ["must have a shape", str(2**62)]),
    "gaps": (
        lambda x: Tensor(x, shape=(2,), strides=(2,)),
        ValueError,
        ["contiguous", "[16]", "x.contiguous()"],
    ),
    "the same twice": (lambda x: Tensor(x, strides=(0,)), ValueError, ["contiguous", "strides [0]"]),
    "null": (lambda x: Tensor(x, data=None), ValueError, ["must have memory", "null"]),
    "version 1": (lambda x: Interface(x, version=1), TypeError, ["version 2 or 3", "Interface", "of 1"]),
    "mask": (lambda x: Interface(x, mask=x), TypeError, ["must have no mask"]),
    "typestr": (lambda x: Interface(x, typestr="nothing"), TypeError, ["'nothing'"]),
    "big end": (lambda x: Interface(x, typestr=">i8"), TypeError, ["this machine's order", "'>i8'"]),
    "stream 0": (lambda x: Interface(x, stream=0), ValueError, ["stream 0", "1 is the legacy one"]),
    "interface with gaps": (lambda x: Interface(x, shape=(2,), strides=(16,)), ValueError, ["contiguous", "[16]"]),
    "a stride too many": (lambda x: Interface(x, strides=(8, 8)), ValueError, ["contiguous", "[8, 8]"]),
    "backwards": (lambda x: Interface(x, strides=(-8,)), ValueError, ["contiguous", "[-8]"]),
    "interface without memory": (lambda x: Interface(x, data=(0, False)), ValueError, ["must have memory"]),
    "between two": (lambda x: Interface(x, data=(address(x) + 4, False)), ValueError, ["a multiple of 8 bytes"]),
    "two dimensions": (lambda x: Interface(x, shape=(2, 2)), ValueError, ["shape [?]", "Received: [2, 2]"]),
}


def address(x):
    from sok.cuda import _native

    return _native.address(x).value


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_taken_is_refused_with_the_arguments_name(cuda, kind):
    import sok.cuda

    make, error, words = REFUSED[kind]
    if kind == "NumPy's" and cuda.name == "emulated":
        pytest.skip("NumPy's arrays are the emulator's")
    keys = cuda.put(np.arange(4))
    given = make(np.arange(4) if kind == "NumPy's" else keys)
    with pytest.raises(error, match=saying("`keys`", *words)):
        sok.cuda.unique(given)
    if type(given) is Tensor:
        for _ in range(2):  # what was taken, and then refused for what it is, is let go by later calls
            sok.cuda.unique(keys)
        gc.collect()
        assert given.deleted == len(given.streams), "what was not taken goes with its capsule"


def test_memory_of_the_host_or_of_another_device_is_refused_whatever_is_said(emulated):
    import sok.cuda

    for foreign in (Interface, Tensor):
        with pytest.raises(ValueError, match=saying("`keys`", "which is 0", "on device 1")):
            sok.cuda.unique(foreign(memory_of(1, 4)))
        for given in (foreign(pinned(4)), foreign(memory_of(0, 4), shape=(1 << 20,))):  # the latter has far fewer
            with pytest.raises(ValueError, match=saying("`keys`", "from its first byte to its last")):
                sok.cuda.unique(given)


def test_a_table_takes_its_bank_from_the_host(cuda):
    import sok.cuda

    bank = Interface(cuda.put(np.zeros((2, 4), np.float32)))
    with pytest.raises(TypeError, match=saying("`bank`", "memory of the host", "Interface")):
        sok.cuda.Table("item", dim=4, capacity=10, initializer="bank", bank=bank)


def test_only_what_may_be_written_is_written(cuda):
    import sok.cuda

    ids, row = cuda.put(np.zeros(1, np.int64)), cuda.put(np.ones((1, 3), np.float32))
    fixed = [lambda x: Interface(x, data=(address(x), True)), lambda x: Tensor(x, flags=1)]
    if cuda.name == "emulated":
        fixed.append(lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape))  # NumPy's own flag
    for read_only in fixed:
        with pytest.raises(ValueError, match=saying("`tables[0].values`", "writable", "read-only")):
            sok.cuda.update_rows("sgd", [1.0], [sok.cuda.Records(read_only(row), 3)], ids, row)
        bad = read_only(cuda.put(np.full(1, 2**64 - 1, np.uint64)))
        with pytest.raises(ValueError, match=saying("`first_bad`", "writable", "read-only")):
            sok.cuda.unsorted_segment_sum(row, ids, 1, first_bad=bad)
        sums = sok.cuda.unsorted_segment_sum(read_only(row), read_only(ids), 1)  # to be read it may be
        np.testing.assert_array_equal(cuda.get(sums), cuda.get(row))


class OfNumPy:
    """By NumPy's own capsules: the stand-ins share their structures with what reads them."""

    def __init__(self, x, version):
        self._x, self._version = x, version
        self.__dlpack_device__ = x.__dlpack_device__

    def __dlpack__(self, *, stream, max_version):
        return self._x.__dlpack__(max_version=self._version and max_version)


@pytest.mark.parametrize("version", [True, None], ids=["with a version", "without"])
def test_capsules_of_another_maker_are_read_and_given_back(emulated, monkeypatch, rng, version):
    import sok.cuda
    from sok.cuda import _dlpack

    monkeypatch.setattr(_dlpack, "_CPU", -1)
    monkeypatch.setattr(_dlpack, "_CUDA", 1)  # as DLPack calls where NumPy's arrays are
    data, ids = rng.normal(size=(5, 3)).astype(np.float32)[1:], np.array([1, 0, 1, -1], np.int32)
    before = [sys.getrefcount(x) for x in (data, ids)]
    for _ in range(3):
        sums = sok.cuda.unsorted_segment_sum(OfNumPy(data, version), OfNumPy(ids, version), 2)
        np.testing.assert_array_equal(sums, [data[1], data[0] + data[2]])
    with pytest.raises(ValueError, match=saying("`data`", "contiguous", "strides [4, 12]")):
        sok.cuda.unsorted_segment_sum(OfNumPy(data.T, version), OfNumPy(ids, version), 2)
    if version:  # without one NumPy itself refuses
        row = np.ones((1, 3), np.float32)
        row.flags.writeable = False
        with pytest.raises(ValueError, match=saying("`tables[0].values`", "read-only")):
            sok.cuda.update_rows("sgd", [1.0], [sok.cuda.Records(OfNumPy(row, True), 3)], ids[1:2], row)
    for _ in range(2):
        sok.cuda.unique(np.arange(3))
    assert [sys.getrefcount(x) for x in (data, ids)] == before


# ---- order: on the emulator, whose streams tests can hold. Its calls wait, as NumPy has no streams; here they do not.


@pytest.fixture
def emulated(emulated_library):
    from tests.contracts import backends

    with backends.Cuda("emulated", emulated_library).loaded():
        yield


@pytest.fixture
def unwaited(emulated, monkeypatch):
    """The stream of the calls, which do not wait for it; contexts that end do. Arrays of NumPy must be kept."""
    from sok.cuda import _native

    stream = Stream.of(None)
    stream.synchronize()
    wait = _native.library().sok_cuda_synchronize
    unless_ending = lambda context: wait(context) if sys._getframe(1).f_code.co_name == "__del__" else 0  # noqa: E731
    monkeypatch.setattr(_native.library(), "sok_cuda_synchronize", unless_ending)
    yield stream
    Stream.let_all_go()
    stream.synchronize()


def open_later(gate):
    """Time enough for what does not wait."""
    time.sleep(0.05)
    gate.set()


class Working(Tensor):
    """A tensor on whose stream there is work, as its library keeps order."""

    def __init__(self, x, stream):
        super().__init__(x)
        self._stream = stream

    def __dlpack__(self, *, stream, **asked):
        from sok.cuda import _native

        lib, event = _native.library(), ctypes.c_void_p()
        lib._Z24cudaEventCreateWithFlagsPP10CUevent_stj(ctypes.byref(event), 2)
        lib._Z15cudaEventRecordP10CUevent_stP11CUstream_st(event, self._stream.handle)
        lib._Z19cudaStreamWaitEventP11CUstream_stP10CUevent_stj(ctypes.c_void_p(stream), event, 0)
        return super().__dlpack__(stream=stream, **asked)


@pytest.mark.parametrize("whose", ["a stream", "the thread's", "DLPack"])
def test_work_waits_for_what_the_producers_stream_was_given_before(unwaited, whose):
    import sok.cuda

    stream = Stream.of(2) if whose == "the thread's" else Stream()
    keys = np.zeros(3, np.int64)
    gate = stream.hold()
    stream.do(lambda: np.copyto(keys, [7, 3, 7]))
    given = Working(keys, stream) if whose == "DLPack" else Interface(keys, stream=stream.handle.value)
    found, num = sok.cuda.unique_padded(given)
    open_later(gate)
    unwaited.synchronize()
    np.testing.assert_array_equal(found.keys[: num[0]], [7, 3])
    if whose == "DLPack":
        assert given.streams == [1], "the legacy default stream, by DLPack's name"


def test_the_producers_stream_waits_with_what_it_is_given_after(unwaited):
    import sok.cuda

    stream, keys = Stream(), np.array([7, 3, 7])
    gate = unwaited.hold()
    found, num = sok.cuda.unique_padded(Interface(keys, stream=stream.handle.value))
    stream.do(lambda: keys.fill(0))  # the next batch, in the same buffer
    open_later(gate)
    unwaited.synchronize()
    np.testing.assert_array_equal(found.keys[: num[0]], [7, 3])
    stream.synchronize()
    assert not keys.any()


@pytest.mark.parametrize("stream", [None, 1], ids=["no stream", "the legacy default, which is ours"])
def test_no_other_stream_is_waited_for(unwaited, stream):
    import sok.cuda

    other = Stream()
    gate = other.hold()
    keys = np.array([7, 3, 7])
    found, num = sok.cuda.unique_padded(Interface(keys, stream=stream))
    unwaited.synchronize()  # while the other is held
    gate.set()
    np.testing.assert_array_equal(found.keys[: num[0]], [7, 3])


def test_a_tensor_is_kept_until_the_device_is_done_and_let_go_once(unwaited):
    import sok.cuda

    tensor, other = Tensor(np.array([7, 3, 7])), np.arange(3)
    gate = unwaited.hold()
    kept = [sok.cuda.unique_padded(tensor), sok.cuda.unique_padded(other)]
    gc.collect()
    assert tensor.deleted == 0, "the device has not begun"
    gate.set()
    unwaited.synchronize()
    for _ in range(2):
        kept.append(sok.cuda.unique_padded(other))
        unwaited.synchronize()
        gc.collect()
        assert tensor.deleted == 1


def test_what_a_refused_call_had_taken_is_let_go_by_the_next(emulated):
    import sok.cuda

    tensor = Tensor(np.zeros((2, 3), np.float32))
    with pytest.raises(TypeError, match="`segment_ids`"):
        sok.cuda.unsorted_segment_sum(tensor, np.zeros(2, np.float32), 1)
    assert tensor.deleted == 0
    for _ in range(2):
        sok.cuda.unique(np.arange(3))
    assert tensor.deleted == 1


def test_a_thread_that_ends_waits_for_its_work_and_has_nothing_left(unwaited):
    import sok.cuda

    tensor, kept = Tensor(np.array([7, 3, 7])), []
    gate = unwaited.hold()
    called = threading.Event()

    def work():
        kept.append(sok.cuda.unique_padded(tensor))
        called.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert called.wait(60)
    thread.join(0.05)
    assert tensor.deleted == 0, "the device has not begun"
    gate.set()
    thread.join()
    gc.collect()
    assert tensor.deleted == 1


def test_every_function_that_takes_arrays_says_how_it_is_ordered():
    import inspect

    import sok.cuda

    classes = [sok.cuda.Table, sok.cuda.TableGroup]
    functions = [getattr(sok.cuda, name) for name in sok.cuda.__all__]
    functions += [function for one in classes for name, function in vars(one).items() if not name.startswith("_")]
    silent, said = [], 0
    for function in filter(inspect.isfunction, functions):
        types = [p.annotation for p in inspect.signature(function).parameters.values()]
        if any(
            word in str(t) for t in types for word in ("Array", "Sequence[Feature", "Sequence[Addends", "Sequence[Any")
        ):
            said += 1
            if "in stream order" not in " ".join((function.__doc__ or "").lower().split()):
                silent.append(function.__qualname__)
    assert not silent and said >= 20, (silent, said)


# ---- the libraries themselves


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "numba.cuda", "torch"])
def test_the_library_itself_gives_and_takes(library):
    """On a stream of its own, on which the keys are written while the host goes on."""
    import cupy

    import sok.cuda

    module = pytest.importorskip(library)
    n = 1 << 22
    expected = np.arange(n) // 2
    for _ in range(5):
        if library == "torch":
            stream = module.cuda.Stream()
            with module.cuda.stream(stream):
                keys = module.arange(n, device="cuda") // 2
                found, num = sok.cuda.unique_padded(keys)
            given_back = module.from_dlpack(found.keys).cpu().numpy()
        elif library == "cupy":
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                keys = Interface(cupy.arange(n) // 2, stream=stream.ptr)
            found, num = sok.cuda.unique_padded(keys)
            given_back = cupy.from_dlpack(found.keys).get()
        else:
            stream = module.stream()
            keys = module.to_device(expected, stream=stream)
            found, num = sok.cuda.unique_padded(keys)
            given_back = module.as_cuda_array(found.keys).copy_to_host()
        assert int(num[0]) == n // 2
        np.testing.assert_array_equal(given_back[: n // 2], expected[::2])


@pytest.mark.gpu
def test_an_array_on_another_device_is_refused():
    import cupy

    import sok.cuda

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")
    with cupy.cuda.Device(1):
        keys = cupy.arange(3)
    with pytest.raises(ValueError, match=saying("`keys`", "which is 0", "on device 1")):
        sok.cuda.unique(keys)


def test_memory_that_is_kept_to_the_end_of_the_process_is_left_without_a_word():
    # A module lets go of what it has when the globals of those that it keeps are None.
    program = "import os; from sok.cuda import _dlpack; os.kept = _dlpack, _dlpack._Owner(1, 1)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
