"""What nvcc made of each kernel: read from the machine code inside libsok_cuda.so, without a tool of CUDA's.

python -m tests.packaging.machine_code    # writes machine_code_sm_80.tsv anew, from the library that is built
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GOLDEN = Path(__file__).with_name("machine_code_sm_80.tsv")
ARCHITECTURE = 80
_CUDA = 190  # e_machine of an ELF file
_REGISTERS, _FRAME, _VALUES = 0x2F, 0x11, 4  # of .nv.info: attributes, and their format: a symbol and a number
_INSTRUCTION = 16  # bytes, since sm_70; the lowest 12 bits say what it does
_LOCAL, _LOADS, _STORES, _GENERIC = (0x983, 0x387), (0x981, 0x980), (0x986, 0x985), (0x980, 0x985)


class Kernel(NamedTuple):
    """Of one kernel. What has no unit is a number of instructions."""

    registers: int  # of a thread
    stack: int  # bytes of a thread
    shared: int  # bytes of a block
    local: int  # loads and stores of the stack
    loads: int  # of global memory, without atomic ones
    stores: int
    generic: int  # of these two, by addresses that could be of other memory for all that the compiler knows
    instructions: int

    def most(self) -> Kernel:
        """What may still pass for this: no more of what bounds how many threads run; a tenth more of the rest."""
        return Kernel(*self[:4], *(n + n // 10 + 4 for n in self[4:]))


class _Elf:
    """One file of machine code, as it lies in `data` from `at` on."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        (first,) = struct.unpack_from("<Q", data, at + 40)
        size, number, of_names = struct.unpack_from("<HHH", data, at + 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, at + first + i * size) for i in range(number)]
        names = headers[of_names][4]
        self.sections = {self._text(names + h[0]): (h[4], h[5]) for h in headers}  # where, and how many bytes

    def bytes_of(self, section: str) -> bytes:
        where, size = self.sections[section]
        return self._data[self._at + where : self._at + where + size]

    def symbol(self, number: int) -> str:
        (name,) = struct.unpack_from("<I", self.bytes_of(".symtab"), 24 * number)
        return self._text(self.sections[".strtab"][0] + name)

    def attributes(self) -> dict[str, dict[int, int]]:
        """What .nv.info says of each symbol."""
        info, found, at = self.bytes_of(".nv.info"), {}, 0
        while at < len(info):
            form, attribute, size = struct.unpack_from("<BBH", info, at)
            if form == _VALUES and size == 8:
                number, value = struct.unpack_from("<II", info, at + 4)
                found.setdefault(self.symbol(number), {})[attribute] = value
            at += 4 + (size if form == _VALUES else 0)
        return found

    def _text(self, where: int) -> str:
        begin = self._at + where
        return self._data[begin : self._data.index(b"\0", begin)].decode()


def _elfs(data: bytes) -> Iterator[_Elf]:
    for match in re.finditer(rb"\x7fELF\x02\x01", data):
        machine, flags = (struct.unpack_from(f, data, match.start() + at)[0] for f, at in (("<H", 18), ("<I", 48)))
        if machine == _CUDA and (flags >> 8 & 0xFF) == ARCHITECTURE:
            yield _Elf(data, match.start())


def short(name: str) -> str:
    """A kernel as we call it: without its parameters, and without namespaces and the type that all have."""
    name = re.sub(r"\(anonymous namespace\)::|sok::|^void ", "", name)
    depth = 0
    for at, letter in enumerate(name):
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "(" and depth == 0:
            return name[:at]
    return name


def kernels_in(library: Path) -> dict[str, Kernel]:
    """Ours, without those of CUB; of several that have one name, the most of each number."""
    found: dict[str, list[Kernel]] = {}
    for elf in _elfs(library.read_bytes()):
        attributes = elf.attributes()
        for section in elf.sections:
            if section.startswith(".text."):
                name = section.removeprefix(".text.")
                code = elf.bytes_of(section)
                does = [word & 0xFFF for (word,) in struct.iter_unpack("<Q8x", code)]
                counts = [sum(map(does.count, kind)) for kind in (_LOCAL, _LOADS, _STORES, _GENERIC)]
                shared = elf.sections.get(f".nv.shared.{name}", (0, 0))[1]
                of_it = attributes[name]
                made = Kernel(of_it[_REGISTERS], of_it[_FRAME], shared, *counts, len(code) // _INSTRUCTION)
                found.setdefault(name, []).append(made)
    said = subprocess.run(["c++filt"], input="\n".join(found), capture_output=True, text=True, check=True).stdout
    merged: dict[str, list[Kernel]] = {}
    for name, made in zip(said.splitlines(), found.values(), strict=True):
        if re.match(r"(void )?sok::", name):
            merged.setdefault(short(name), []).extend(made)
    return {name: Kernel(*map(max, zip(*all_of_it, strict=True))) for name, all_of_it in sorted(merged.items())}


def write(path: Path, kernels: dict[str, Kernel], toolkit: str) -> None:
    lines = [f"# nvcc {toolkit}", "\t".join((*Kernel._fields, "kernel"))]
    lines += ["\t".join((*map(str, kernel), name)) for name, kernel in kernels.items()]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def read(path: Path) -> tuple[str, dict[str, Kernel]]:
    """The toolkit, and its kernels."""
    toolkit, fields, *lines = path.read_text("utf-8").splitlines()
    assert fields.split("\t") == [*Kernel._fields, "kernel"]
    rows = [line.split("\t") for line in lines]
    return toolkit.removeprefix("# nvcc "), {row[-1]: Kernel(*map(int, row[:-1])) for row in rows}


def main() -> None:
    from sok.base import _ops

    info = _ops.build_info() or {}
    kernels = kernels_in(Path(_ops.library_path()).with_name("libsok_cuda.so"))
    if not kernels:
        raise SystemExit(
            f"the library has no machine code for sm_{ARCHITECTURE}: build it with CUDAARCHS={ARCHITECTURE}"
        )
    write(GOLDEN, kernels, str(info["cuda"]))
    print(f"{len(kernels)} kernels of nvcc {info['cuda']} in {GOLDEN}")


if __name__ == "__main__":
    main()
