"""Where rows can lie: a table of sok in memory or over a file, RocksDB, and a file that is mapped."""
