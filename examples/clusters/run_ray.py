#!/usr/bin/env python3
"""Workers on a Ray cluster, by Horovod's own integration: python run_ray.py FOLDER --workers 4 (pip install ray)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="that all hosts see")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=1, help="of each worker")
    parser.add_argument("--gpu", action="store_true", help="one for each worker")
    options = parser.parse_args()

    import ray
    from horovod.ray import RayExecutor

    path = os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": path}})  # the cluster of RAY_ADDRESS, or one on this machine
    executor = RayExecutor(
        RayExecutor.create_settings(timeout_s=100),
        num_workers=options.workers,
        cpus_per_worker=options.cpus,
        use_gpu=options.gpu,
    )
    executor.start()
    try:
        print(executor.run(train, args=[options.folder]))
    finally:
        executor.shutdown()


def train(folder: str) -> float:
    from train import train as of_this_folder  # on the worker

    return of_this_folder(folder)


if __name__ == "__main__":
    main()
