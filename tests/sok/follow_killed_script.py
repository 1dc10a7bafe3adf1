"""FEED EXPORTS FOLDER: a follower is killed at each step of a poll, and another one goes on.

Prints, for each step, the step and the versions that lie there after the kill. (Forked, as loading TensorFlow each
time would take seconds; this process itself runs no op, so it has no threads that a fork would lose.)
"""

import os
import shutil
import signal
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import sok
from sok.saved_model import followed_redis, following, redis_store, table_file
from tests import children

STEPS = {
    "before it is begun": (following, "_copy", "before"),
    "after the copy": (following, "_copy", "after"),
    "after dense weights": (following, "_write_dense", "after"),
    "in the middle of a table": (table_file.ServingFile, "add_records", "after"),
    "after a table": (table_file.TableFile, "write", "after"),
    "before its description": (following, "_tell", "before"),
    "before it is renamed": (os, "rename", "before"),
    "after it is renamed": (os, "rename", "after"),
}
REDIS_STEPS = {
    "when it is begun": (redis_store.VersionStore, "begin", "after"),
    "after a copy": (redis_store.VersionStore, "copy", "after"),
    "before it is renamed": (os, "rename", "before"),
    "after it is renamed": (os, "rename", "after"),
    "in the middle of retiring": (redis_store.VersionStore, "_of_all_buckets", "before"),
}


def killed_at(feed, exports, module, name, when):
    function = getattr(module, name)

    def dies(*args, **kwargs):
        if when == "after":
            function(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, dies)
    sok.follow_export(feed, exports).poll()


def goes_on(feed, exports):
    assert sok.follow_export(feed, exports, max_to_keep=None).poll() or os.path.exists(f"{exports}/2")
    assert sok.follow_export(feed, exports).poll() is None


def main(feed, exports, folder, steps):
    for number, (what, step) in enumerate(steps.items()):
        here = f"{folder}/{number}"
        shutil.copytree(exports, here)
        assert children.ended(killed_at, feed, here, *step) == signal.SIGKILL, what
        print(what, *sorted(name for name in os.listdir(here) if name.isdigit()), sep=": ", flush=True)
        assert children.ended(goes_on, feed, here) == 0, what


if __name__ == "__main__":
    from sok.base import _ops

    _ops.lib()
    main(*sys.argv[1:4], REDIS_STEPS if sys.argv[4:] else STEPS)
    assert followed_redis
