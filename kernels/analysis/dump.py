"""Which files of a compiler dump belong to which kernel.

Owns the names libtpu gives its files (`<stamp>-<kernel>-<nn>-<pass>.txt`, optionally gzipped) and
the list of passes this package reads. Knows nothing of what is inside.
"""

from __future__ import annotations

import gzip
import re
from dataclasses import dataclass
from pathlib import Path

# What each pass is to us. `TIMED` is the schedule before the compiler drops the empty bundles that
# the hardware's own interlocks stand in for, so it alone shows result latencies.
FINAL = "final_bundles"
TIMED = "packed-bundles-post-ra"
SLOTS = "final_hlo-static-per-bundle-utilization"
ALLOCATIONS = "pre-finalize-registers-and-allocations"

# For `--xla_jf_dump_llo_pass_label_regex`: what is read and nothing more, writing takes long.
PASS_REGEX = f"({FINAL}|{TIMED}|{SLOTS}|{ALLOCATIONS})"

_FILE = re.compile(rf"(\d+)-(.+)-\d+-({FINAL}|{TIMED}|{SLOTS}|{ALLOCATIONS})\.txt(?:\.gz)?")


class DumpError(ValueError):
    """A dump that can't be read, with the file and, where known, the line."""

    def __init__(self, path: Path, what: str, line: int | None = None) -> None:
        place = str(path) if line is None else f"{path}:{line}"
        super().__init__(f"{place}: {what}")


@dataclass(frozen=True, slots=True)
class KernelFiles:
    """The files of one compiled kernel.

    Attributes:
        stamp: the compiler's number of this compilation.
        name: the kernel's name, as the compiler made it unique.
        final: final bundles; the others are None where the dump lacks them.
    """

    stamp: str
    name: str
    final: Path
    timed: Path | None
    slots: Path | None
    allocations: Path | None


def kernel_files(folder: Path) -> list[KernelFiles]:
    """Every kernel of the dump, oldest first; the program around the kernels is left out."""
    if not folder.is_dir():
        raise DumpError(folder, "no such folder")
    found: dict[tuple[str, str], dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match and match[2] != "TLP" and not match[2].startswith("<"):
            found.setdefault((match[1], match[2]), {})[match[3]] = path
    return [
        KernelFiles(stamp, name, of[FINAL], of.get(TIMED), of.get(SLOTS), of.get(ALLOCATIONS))
        for (stamp, name), of in found.items()
        if FINAL in of
    ]


def read_lines(path: Path) -> list[str]:
    """The lines of a file of the dump."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return text.decode(errors="replace").splitlines()
