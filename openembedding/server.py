"""`python -m openembedding.server`: a server that holds tables, as OpenEmbedding's own `server.py` is started.

Without --master_endpoint it is the master, too, at the port of --bind_ip: the first server of a cluster.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from openembedding.servers import Master, Server, address_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a server until its worker has ended; 2 for arguments that make no sense."""
    parser = argparse.ArgumentParser(prog="openembedding.server", description="Holds tables for a worker.")
    parser.add_argument("--bind_ip", default="", metavar="IP[:PORT]", help="by which workers reach this host")
    parser.add_argument("--master_endpoint", default="", metavar="IP:PORT", help="without it this process has a master")
    parser.add_argument("--pmem", default="", metavar="FOLDER", help="where the worker's flags.config has rows: made")
    options = parser.parse_args(arguments)
    try:
        address_of(options.bind_ip, "bind_ip")
        if options.pmem:
            os.makedirs(options.pmem, exist_ok=True)
        master = None if options.master_endpoint else Master(options.bind_ip)
        endpoint = options.master_endpoint or master.endpoint  # type: ignore[union-attr]
        server = Server(options.bind_ip, endpoint)
    except (OSError, ValueError) as error:
        print(f"openembedding.server: {error}", file=sys.stderr)
        return 2
    print(f"openembedding.server: {server.address}, master {endpoint}", flush=True)
    server.join()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # TensorFlow's server has no end of its own
