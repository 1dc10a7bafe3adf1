"""Tables in files of other systems: SOK v1's `Saver`, SOK v2's `dump` and `load`, NumPy's `.npy`, and OpenEmbedding.

    columns.py      a table in files, read in pieces; what can be wrong with it
    destination.py   whether a table in files fits into a table of this job
    writing.py      files that appear whole or not at all
    v1.py v2.py npy.py   what each format calls its files and puts before the data
    openembedding.py openembedding_states.py   what lies in a checkpoint of OpenEmbedding
    convert.py      from one format to another, without a table
    shard.py        a worker's share of a table, as what goes into files
    dump.py load.py      between files and the tables of all workers
    graphs.py       the same program for eager mode and graphs
    slots.py        optimizer state under SOK's names
    saver.py dump_load.py numpy_files.py openembedding_load.py   what users call

The files down to convert.py know NumPy only. docs/old_formats.md describes the formats.
"""
