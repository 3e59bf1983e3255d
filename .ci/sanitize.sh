#!/usr/bin/env bash
# Runs the tests of the native CPU backend with AddressSanitizer and UBSan in its libraries:
# `sanitize.sh PYTHON`, a Python with torch, pip and the tests' packages. g++ is needed too.
#
# The package is built and installed from a copy of the tracked files, in a temporary folder. First
# a deliberate read behind a cache has to end in a report: otherwise a silent run proves nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(command -v "${1:?usage: sanitize.sh PYTHON}")

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/tree"
git ls-files -z | tar --null --files-from=- -cf - | tar -xf - -C "$work/tree"
cd "$work/tree"
HF_PAGED_CPU_SANITIZE=1 "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --target "$work/site" . || exit
# Else the folder one is in would be imported, not the installed package.
rm -rf hf_paged patches build
printf -- '--- built: %d s\n' $SECONDS

# ASan has to be there before torch, and libstdc++ before ASan looks for what throws.
library() { "${CXX:-g++}" -print-file-name="$1"; }
export PYTHONPATH="$work/site:$work/tree/tests" PYTHONDONTWRITEBYTECODE=1
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
unset HF_PAGED_CPU_ISA
sanitized() { LD_PRELOAD="$(library libasan.so):$(library libstdc++.so.6)" "$@"; }

isas=$(sanitized "$python" - "$work/site" <<'END'
import sys
from hf_paged.backends import native

assert native.__file__.startswith(sys.argv[1]), f"{native.__file__} is not the sanitized build"
usable = [isa for isa in native.supported_isas() if isa in native.built_isas()]
assert usable, native.unavailable_reason()
for isa in usable:
    path = native._path(isa)
    assert b"__asan_init" in path.read_bytes(), f"{path} is not sanitized"
    native.NativeLibrary(path)
print(*usable)
END
)

for isa in $isas; do
    if HF_PAGED_CPU_ISA=$isa sanitized "$python" - >"$work/overflow.log" 2>&1 <<'END'
import torch
from backends.paged_batch import PagedBatch, random_rows
from hf_paged.backends.registry import create_backend

batch = PagedBatch(random_rows([(7, 1)]), create_backend("cpu", torch.device("cpu")), 4)
batch.forward()
# The tables were checked; now their first entry names the block behind the last one.
batch.metadata.block_tables[0, 0] = batch.view.key_cache.shape[0]
batch.forward()
END
    then
        echo "a read behind the cache went unnoticed ($isa)"
        exit 1
    fi
    grep -q "AddressSanitizer: heap-buffer-overflow" "$work/overflow.log" || {
        cat "$work/overflow.log"
        exit 1
    }
done
printf -- '--- a read behind the cache is reported for each of: %s\n' "$isas"

# test_cpu_* go through all instruction sets by themselves, their neighbours take the best. Left out:
# what compiles (the sources are gone) or computes in torch, long rows, and 8 GiB of address space, an
# eighth of which ASan would fill.
sanitized "$python" -m pytest -n 2 -q -p no:cacheprovider tests/backends -k "cpu and not (\
    test_cpu_compile or test_cpu_fallback or without_a_compiler or newer_compilers or thousands or \
    any_place or no_other_row or same_call or 2_to_the_31)"
