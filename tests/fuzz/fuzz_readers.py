"""TARGET [options of libFuzzer] [corpus ...]: fuzzes one of the readers in Python, with Atheris.

TARGET is manifest, v1, v2, npy or openembedding (tests/fuzz/readers.py).
"""

import random
import sys

import atheris

with atheris.instrument_imports(include=["sok.checkpoint", "sok.compat.formats", "numpy.lib"]):
    from tests.fuzz import mutate_json, readers


def main() -> None:
    target = sys.argv.pop(1)
    options = {}
    if target == "manifest":

        def mutated(data: bytes, max_size: int, seed: int) -> bytes:
            made = mutate_json.changed(data, random.Random(seed), lambda part: atheris.Mutate(part, len(part) + 8))
            return made if len(made) <= max_size else atheris.Mutate(data, max_size)

        options["custom_mutator"] = mutated
    atheris.Setup(sys.argv, readers.TARGETS[target], **options)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
