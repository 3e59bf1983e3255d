"""Builds the native CPU backend, once for each instruction set; pyproject.toml says the rest.

A shared library is plain C++17 behind a C interface, so it depends on no version of Python or
torch. Where it cannot be compiled the install goes on without it, and leaves the reason in a file
that ``backend="auto"`` quotes.

HF_PAGED_CPU_SANITIZE=1 builds with AddressSanitizer and UBSan, for tests.
"""

from __future__ import annotations

import copy
import os
import platform
import shutil
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent
SOURCES = "hf_paged/backends/csrc"
# No package: what lies there looks like extension modules to pkgutil, and is none.
LIBRARIES = "hf_paged/backends/lib"
BUILD_LOG = "build.txt"

# Neither -march=native (a wheel moves) nor -ffast-math (-inf is a number here).
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-g0",
]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
ISA_FLAGS = {"portable": []}
if platform.machine() in ("x86_64", "AMD64"):
    ISA_FLAGS |= {
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": AVX512,
        "amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    }
# Compilers from before AMX (GCC before 11, clang before 12) build the others.
NEWEST = "amx"
NEWEST_PROBE = "#include <immintrin.h>\nvoid probe() { _tile_dpbf16ps(0, 1, 2); }\n"
SANITIZE = (
    ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-O1"]
    if os.environ.get("HF_PAGED_CPU_SANITIZE")
    else []
)


class BuildNative(build_ext):
    """Names libraries without the Python ABI, and lets an install succeed without them."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or True

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # there is no PyInit function

    def run(self) -> None:
        folder = (ROOT if self.inplace else Path(self.build_lib)) / LIBRARIES
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / BUILD_LOG
        log.unlink(missing_ok=True)
        try:
            super().run()
        except Exception as error:  # distutils' many kinds of failure, all with a message
            reason = f"{type(error).__name__}: {error}"
            if not shutil.which(os.environ.get("CXX", "c++")):
                reason = f"no C++ compiler was found; {reason}"
            self.warn(f"hf_paged is installed without its native CPU backend: {reason}")
            log.write_text(reason + "\n")

    def build_extensions(self) -> None:
        if NEWEST in ISA_FLAGS and not self._compiles_newest():
            (left_out,) = [ext for ext in self.extensions if ext.name.endswith(f"_{NEWEST}")]
            self.warn(f"{left_out.name} is left out: this compiler does not know {NEWEST}")
            self.extensions = [ext for ext in self.extensions if ext is not left_out]
            for folder in (ROOT, Path(self.build_lib)):  # another compiler's
                (folder / self.get_ext_filename(left_out.name)).unlink(missing_ok=True)
        super().build_extensions()

    def _compiles_newest(self) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.cpp")
            source.write_text(NEWEST_PROBE)
            try:
                self.compiler.compile(
                    [str(source)], output_dir=folder, extra_postargs=ISA_FLAGS[NEWEST]
                )
            except CompileError:
                return False
        return True

    def build_extension(self, ext: Extension) -> None:
        # One folder for the objects of each instruction set, since the sources are the same; and
        # one command object, since they are built in parallel.
        command = copy.copy(self)
        command.build_temp = os.path.join(self.build_temp, ext.name)
        build_ext.build_extension(command, ext)


class PlatformWheel(bdist_wheel):
    """A wheel for every Python 3 on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"{LIBRARIES.replace('/', '.')}.libhf_paged_cpu_{isa}",
            sources=[f"{SOURCES}/attention.cpp", f"{SOURCES}/blocks.cpp"],
            depends=[str(p.relative_to(ROOT)) for p in sorted((ROOT / SOURCES).glob("*.h"))],
            language="c++",
            extra_compile_args=[*FLAGS, *isa_flags, *SANITIZE],
            extra_link_args=SANITIZE,
        )
        for isa, isa_flags in ISA_FLAGS.items()
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
