"""A process that knows TensorFlow and not `sok`: loads SavedModels and answers with what they predict.

Run as a script, with the path of a library of ops to load, if any, it reads pickled (path, signature, inputs,
in_session) from standard input and writes pickled outputs, or texts of errors, to standard output.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO


def _write(stream: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<q", len(data)) + data)
    stream.flush()


def _read(stream: BinaryIO) -> Any:
    head = stream.read(8)
    return pickle.loads(stream.read(struct.unpack("<q", head)[0])) if len(head) == 8 else None


class Stranger:
    """The process, from outside."""

    def __init__(self, folder: Path, library: Path | str | None = None) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        # -I: neither PYTHONPATH nor the current folder is searched.
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, *([] if library is None else [str(library)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=environment,
        )

    def predict(
        self, path: str, inputs: dict[str, Any], signature: str = "serving_default", in_session: bool = False
    ) -> dict[str, Any]:
        """What the model at `path` gives; a RuntimeError with the text of an error there.

        `in_session`: loaded as TensorFlow Serving does, into a session.
        """
        _write(self._process.stdin, (str(path), signature, inputs, in_session))
        answer = _read(self._process.stdout)
        if not isinstance(answer, dict):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


def _in_session(path: str, signature: str, inputs: dict[str, Any]) -> dict[str, Any]:
    import tensorflow.compat.v1 as v1

    with v1.Graph().as_default(), v1.Session() as session:
        described = v1.saved_model.load(session, ["serve"], path).signature_def[signature]
        fed = {described.inputs[name].name: x for name, x in inputs.items()}
        return session.run({name: tensor.name for name, tensor in described.outputs.items()}, fed)


def main() -> None:
    answers, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr  # what others print must not come between
    sys.modules["sok"] = None  # wherever it is installed, it cannot be imported
    import tensorflow as tf

    try:
        import sok  # noqa: F401
    except ImportError:
        pass
    else:
        raise AssertionError("this process must not know sok")
    for library in sys.argv[1:]:
        tf.load_op_library(library)
    loaded: dict[str, Any] = {}
    while (request := _read(sys.stdin.buffer)) is not None:
        path, signature, inputs, in_session = request
        try:
            if in_session:
                answer = _in_session(path, signature, inputs)
            else:
                if path not in loaded:
                    loaded[path] = tf.saved_model.load(path)
                outputs = loaded[path].signatures[signature](**{name: tf.constant(x) for name, x in inputs.items()})
                answer = {name: tensor.numpy() for name, tensor in outputs.items()}
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        # In this process no module of ours was loaded by TensorFlow either.
        assert not any(name.split(".")[0] == "sok" and module is not None for name, module in sys.modules.items())
        _write(answers, answer)


if __name__ == "__main__":
    main()
