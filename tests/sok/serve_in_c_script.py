"""Serves a SavedModel by TensorFlow's C interface alone: FRAMEWORK CC LIBRARY MODEL INPUT OUTPUT ID... prints numbers.

What a server written in C would do, said with ctypes: no Python of TensorFlow's is loaded.
"""

import ctypes
import sys
from ctypes import POINTER, Structure, c_char_p, c_int, c_int64, c_size_t, c_void_p

INT64 = 9  # TF_INT64


class Output(Structure):
    _fields_ = (("operation", c_void_p), ("index", c_int))


def main(framework: str, cc: str, library: str, model: str, given: str, asked: str, *ids: str) -> None:
    ctypes.CDLL(framework, ctypes.RTLD_GLOBAL)
    tf = ctypes.CDLL(cc, ctypes.RTLD_GLOBAL)
    for name in ("NewStatus", "LoadLibrary", "NewSessionOptions", "NewGraph", "LoadSessionFromSavedModel"):
        getattr(tf, f"TF_{name}").restype = c_void_p
    for name in ("GraphOperationByName", "AllocateTensor", "TensorData"):
        getattr(tf, f"TF_{name}").restype = c_void_p
    tf.TF_Message.restype, tf.TF_TensorByteSize.restype = c_char_p, c_size_t
    status = c_void_p(tf.TF_NewStatus())

    def check() -> None:
        if tf.TF_GetCode(status):
            sys.exit(tf.TF_Message(status).decode())

    if library:  # else it was preloaded
        tf.TF_LoadLibrary(library.encode(), status)
        check()
    graph, options, tags = c_void_p(tf.TF_NewGraph()), c_void_p(tf.TF_NewSessionOptions()), (c_char_p * 1)(b"serve")
    session = c_void_p(tf.TF_LoadSessionFromSavedModel(options, None, model.encode(), tags, 1, graph, None, status))
    check()

    def place(tensor: str) -> Output:
        name, _, index = tensor.partition(":")
        operation = tf.TF_GraphOperationByName(graph, name.encode())
        assert operation, f"no operation {name}"
        return Output(operation, int(index))

    keys, dims = (c_int64 * len(ids))(*map(int, ids)), (c_int64 * 2)(1, len(ids))
    tensor = c_void_p(tf.TF_AllocateTensor(INT64, dims, 2, c_size_t(8 * len(ids))))
    ctypes.memmove(tf.TF_TensorData(tensor), keys, 8 * len(ids))
    inputs, outputs = (Output * 1)(place(given)), (Output * 1)(place(asked))
    values, results = (c_void_p * 1)(tensor), (c_void_p * 1)()
    tf.TF_SessionRun(session, None, inputs, values, 1, outputs, results, 1, None, 0, None, status)
    check()
    result = c_void_p(results[0])
    count = tf.TF_TensorByteSize(result) // 4
    data = ctypes.cast(c_void_p(tf.TF_TensorData(result)), POINTER(ctypes.c_float))
    print(*[repr(data[i]) for i in range(count)])


if __name__ == "__main__":
    main(*sys.argv[1:])
