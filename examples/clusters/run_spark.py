#!/usr/bin/env python3
"""Workers in the tasks of a Spark job, by Horovod's own integration (pip install pyspark pyarrow):

spark-submit --master spark://HOST:7077 --py-files train.py run_spark.py FOLDER --workers 4
"""

from __future__ import annotations

import argparse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="that all hosts see")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    import horovod.spark
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName("sok").getOrCreate()
    try:
        print(horovod.spark.run(train, args=[options.folder], num_proc=options.workers, use_gloo=True))
    finally:
        spark.stop()


def train(folder: str) -> float:
    from train import train as of_this_folder  # on the worker

    return of_this_folder(folder)


if __name__ == "__main__":
    main()
