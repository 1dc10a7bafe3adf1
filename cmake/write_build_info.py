"""Writes build_info.json beside the native library: write_build_info.py FILE KEY=VALUE..."""

import datetime
import json
import os
import subprocess
import sys
import time


def git_version() -> str:
    """The source's git description, or 'unknown' outside a checkout (an sdist)."""
    source = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not os.path.exists(os.path.join(source, ".git")):
        return "unknown"
    try:
        command = ["git", "-C", source, "describe", "--always", "--dirty", "--tags"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main(path: str, pairs: list[str]) -> None:
    info: dict[str, str | int] = dict(pair.split("=", 1) for pair in pairs)
    info["cxx11_abi"] = int(info["cxx11_abi"])
    info["git_version"] = git_version()
    # SOURCE_DATE_EPOCH is how packagers ask for a build that repeats bit for bit.
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    info["date"] = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(info, file, indent=2)
        file.write("\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
