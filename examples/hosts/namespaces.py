"""Several hosts on one machine: what a job over hosts is tested and measured on. Linux, as root.

Each host has an address and a hostname of its own, its own processes and its own /dev/shm: Linux namespaces, as
containers have them. A bridge connects them, or, where latency is wanted, a forwarder between TUN devices.

All that is made belongs to processes that end with this one, however it ends: nothing is left behind, and nothing of
the machine's own network changes.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_BUILD = _HERE.parents[1] / "build" / "hosts"
INTERFACE = "net0"
# Every host has a bridge of this address, as hosts with Docker have: not the way to another host.
_DECOY = "172.17.0.1/16"
_SECONDS = 20.0
_PREFIX = "sok-hosts-of-"  # and the maker's process number
_MOST_WINDOW = 64 << 20  # bytes
_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_SSHD_CONFIG = """\
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PasswordAuthentication no
UsePAM no
PermitRootLogin yes
PidFile none
"""
_SSH_CONFIG = """\
IdentityFile {folder}/key
GlobalKnownHostsFile {folder}/known_hosts
UserKnownHostsFile none
"""


def why_not() -> str:
    """Why there can be no such hosts on this machine, in words; empty if there can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc", "unshare", "nsenter", "mount") if shutil.which(program) is None]
    if missing:
        return f"not in PATH: {', '.join(missing)} (packages iproute2, util-linux)"
    spaces = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--mount-proc", "sh", "-c"]
    steps = "hostname x && mount -t tmpfs none /dev/shm && ip link add x0 type veth peer name x1"
    tried = subprocess.run(
        [*spaces, f"{steps} && ip link add x2 type bridge"], capture_output=True, text=True, timeout=_SECONDS
    )
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""


def has_openssh() -> bool:
    """Whether OpenSSH is installed, its server too."""
    return None not in (_SSHD, shutil.which("ssh"), shutil.which("ssh-keygen"))


@dataclasses.dataclass(frozen=True)
class Host:
    """One of the hosts."""

    name: str
    address: str
    pid: int  # of its first process, as this process sees it


class Hosts:
    """Makes hosts and their network; a context manager, which removes all again.

    Args:
        count: how many.
        rate: bits per second that each host sends at the most, as tc writes them ("1gbit"); None: as fast as it goes.
        latency: seconds one way; None: no forwarder between the hosts, only a bridge.
        openssh: `ssh` between the hosts is OpenSSH. False: remote_shell.py stands in for it. None: where it is not
            installed.

    Raises:
        RuntimeError: it cannot be done on this machine (`why_not` says so before).

    Example: `with Hosts(2) as hosts: hosts.run(0, ["hostname"])`
    """

    def __init__(
        self, count: int, rate: str | None = None, latency: float | None = None, openssh: bool | None = None
    ) -> None:
        self.openssh = has_openssh() if openssh is None else openssh
        if self.openssh and not has_openssh():
            raise RuntimeError("OpenSSH is not installed, or not its server: apt-get install openssh-server.")
        self._held: list[subprocess.Popen[str]] = []
        self._wire: subprocess.Popen[str] | None = None  # the forwarder
        _remove_stale_folders()
        self._folder = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-")
        self.hosts: list[Host] = []
        addresses = {f"host-{chr(ord('a') + i)}": f"10.77.0.{i + 1}" for i in range(count)}
        try:
            self._write_files(addresses)
            self._switch = self._hold(["unshare", "--net", "--fork", "--kill-child"], "echo ready; read x")
            if latency is None:
                self._ip(self._switch, "link add switch type bridge", "link set switch up")
            for name, address in addresses.items():
                self.hosts.append(Host(name, address, self._start(name)))
            if latency is not None:
                self._forward(latency)
            for place in range(count):
                self._connect(place, rate, is_bridged=latency is None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all that runs in the hosts, and removes them and their network."""
        for process in self._held:
            process.stdin.close()  # the kernel ends all processes of a host with its first
        for process in self._held:
            try:
                process.wait(_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._held.clear()
        self._folder.cleanup()

    def command(self, place: int, command: Sequence[str]) -> list[str]:
        """What runs `command` in a host: for subprocess. Its `ssh` reaches the other hosts, by name."""
        path = f"{self._folder.name}/bin:{os.environ.get('PATH', '')}"
        spaces = ["nsenter", "-t", str(self.hosts[place].pid), "-n", "-u", "-i", "-m", "-p", f"--wd={os.getcwd()}"]
        return [*spaces, "env", f"PATH={path}", *command]

    def run(self, place: int, command: Sequence[str], seconds: float = _SECONDS) -> str:
        """Runs `command` in a host and gives its output; subprocess.CalledProcessError if it fails."""
        done = subprocess.run(
            self.command(place, command), capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
        done.check_returncode()
        return done.stdout

    def cut(self, place: int) -> None:
        """Takes a host's link down: nobody reaches it any more, and its peers are told nothing."""
        self._ip(self.hosts[place].pid, f"link set {INTERFACE} down")

    def change(self, rate: str, latency: float) -> None:
        """Gives the network another rate and latency. It was made with both."""
        wire = self._wire
        if wire is None or wire.stdin is None or wire.stdout is None:
            raise RuntimeError("Only hosts that were made with a `latency` have a network that changes.")
        wire.stdin.write(f"{round(latency * 1e9)}\n")
        wire.stdin.flush()
        if wire.stdout.readline() != "ready\n":
            raise RuntimeError("The forwarder between the hosts has ended.")
        for host in self.hosts:
            self._limit(host.pid, "replace", rate)

    def _limit(self, pid: int, how: str, rate: str) -> None:
        limits = f"rate {rate} burst 256k limit 64m"
        self._in_net(pid, *f"tc qdisc {how} dev {INTERFACE} root tbf {limits}".split())

    def _write_files(self, addresses: dict[str, str]) -> None:
        folder = Path(self._folder.name)
        lines = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + lines)
        (folder / "bin").mkdir()
        ssh = folder / "bin" / "ssh"
        if not self.openssh:
            ssh.symlink_to(_HERE / "remote_shell.py")
            return
        # One key for all hosts and for who comes: what is new to nobody is asked about by nobody.
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True, timeout=_SECONDS
        )
        key = (folder / "key.pub").read_text()
        (folder / "known_hosts").write_text("".join(f"{name} {key}" for name in addresses))
        (folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=folder))
        (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder))
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)

    def _start(self, name: str) -> int:
        """Starts a host that has no network yet."""
        unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        folder = self._folder.name
        steps = [
            f"hostname {name}",
            "mount -t tmpfs tmpfs /dev/shm",
            f"mount --bind {folder}/hosts /etc/hosts",
        ]
        if self.openssh:
            steps += [
                "mount -t tmpfs tmpfs /run",
                "mkdir -m 755 /run/sshd",
                f"{_SSHD} -f {folder}/sshd_config -E {folder}/{name}.log",
                "echo ready",
                "exec cat >/dev/null",  # until whoever made the host ends, however it ends
            ]
        else:
            steps.append(f"exec {sys.executable} {_HERE}/remote_shell.py serve")
        return self._hold(unshare, " && ".join(steps))

    def _hold(self, spaces: Sequence[str], script: str) -> int:
        """Starts a process, in namespaces of its own, that ends with this one; its number."""
        process = subprocess.Popen(
            [*spaces, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._held.append(process)
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(spaces)}: this did not start; what it said stands above.")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(children[0]) if spaces else process.pid

    def _connect(self, place: int, rate: str | None, is_bridged: bool) -> None:
        host = self.hosts[place]
        if is_bridged:
            self._ip(
                self._switch,
                f"link add port{place} type veth peer name {INTERFACE} netns {host.pid}",
                f"link set port{place} master switch up",
            )
        self._ip(
            host.pid,
            "link set lo up",
            f"addr add {host.address}/24 dev {INTERFACE}",
            f"link set {INTERFACE} mtu {1500 if is_bridged else 65535} txqueuelen 4000 up",
            "link add docker0 type bridge",
            f"addr add {_DECOY} dev docker0",
            "link set docker0 up",
        )
        for which in ("tcp_rmem", "tcp_wmem"):  # windows as wide as 10 Gbit/s over 10 ms need, as clusters have them
            self._in_net(host.pid, "sh", "-c", f"echo 4096 131072 {_MOST_WINDOW} > /proc/sys/net/ipv4/{which}")
        if rate is not None:
            self._limit(host.pid, "add", rate)

    def _forward(self, latency: float) -> None:
        command = [str(forwarder()), str(round(latency * 1e9)), INTERFACE, *(str(host.pid) for host in self.hosts)]
        self._hold([], f"exec {' '.join(command)}")
        self._wire = self._held[-1]

    def _ip(self, pid: int, *commands: str) -> None:
        for command in commands:
            self._in_net(pid, "ip", *command.split())

    def _in_net(self, pid: int, *command: str) -> None:
        done = subprocess.run(
            ["nsenter", "-t", str(pid), "-n", *command], capture_output=True, text=True, timeout=_SECONDS
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _remove_stale_folders() -> None:
    """Of makers that were killed: their hosts ended with them, these few files did not."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def forwarder() -> Path:
    """The program that forwards between TUN devices, built where it is not yet."""
    source = _HERE / "forward.cc"
    program = _BUILD / "forward"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        _BUILD.mkdir(parents=True, exist_ok=True)
        made = program.with_name(f"forward.{os.getpid()}")
        subprocess.run([os.environ.get("CXX", "g++"), "-O2", "-std=c++17", "-o", str(made), str(source)], check=True)
        made.rename(program)
    return program
