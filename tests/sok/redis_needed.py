"""What tests of rows in Redis need. Where it is not there they are skipped, and say so."""

import pytest

from sok.base import _ops

redis = pytest.importorskip("redis")
redis_servers = pytest.importorskip("examples.redis_servers")

NEEDED = [
    pytest.mark.skipif(bool(redis_servers.missing()), reason=redis_servers.missing()),
    pytest.mark.skipif(not _ops.has_redis(), reason="libsok_serving.so was built without hiredis"),
    pytest.mark.xdist_group("redis"),  # a cluster of six servers is enough for the cores there are
]
