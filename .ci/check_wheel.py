"""Compare a wheel's content with the files git tracks: `check_wheel.py WHEEL`.

Every tracked Python file and `py.typed` of `hf_paged/` and `patches/` must be in the wheel, the
latter under `hf_paged/patches/`, with the same bytes, and the compiled libraries with them: one for
each instruction set of x86-64, `portable` elsewhere. Nothing else but metadata.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
ISAS = ("amx", "avx2", "avx512", "portable") if platform.machine() == "x86_64" else ("portable",)
LIBRARIES = {f"hf_paged/backends/lib/libhf_paged_cpu_{isa}.so" for isa in ISAS}


def packaged(path: PurePosixPath) -> bool:
    return path.suffix == ".py" or path.name == "py.typed"


def expected_files() -> dict[str, Path]:
    """Name in the wheel -> file in the tree."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--", "hf_paged", "patches"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    tracked = [PurePosixPath(name) for name in listing.split("\0") if name]
    return {
        str("hf_paged" / path if path.parts[0] == "patches" else path): ROOT / path
        for path in tracked
        if packaged(path)
    }


def main(wheel: str) -> int:
    expected = expected_files()
    with zipfile.ZipFile(wheel) as archive:
        found = {
            name
            for name in archive.namelist()
            if not name.endswith("/") and ".dist-info/" not in name
        }
        missing = sorted((expected.keys() | LIBRARIES) - found)
        extra = sorted(found - expected.keys() - LIBRARIES)
        changed = sorted(
            name
            for name in expected.keys() & found
            if archive.read(name) != expected[name].read_bytes()
        )
    if not expected:
        print("git tracks no file of hf_paged/ or patches/")
    for problem, names in [
        ("tracked or built, but not in the wheel", missing),
        ("in the wheel, but neither tracked nor built", extra),
        ("differs from the tracked file", changed),
    ]:
        for name in names:
            print(f"{problem}: {name}")
    if not expected or missing or extra or changed:
        return 1
    print(f"{Path(wheel).name}: {len(found)} files, as tracked and built")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
