"""What the native module shows to the linker: one name, and no copy of anything for one CPU.

A target's unit may define a single global symbol and no weak one: the linker may keep one copy of a
weak symbol for everybody, and a copy made for AVX-512 would end a process on an older CPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from kernel_process import LISTED, UNITS, flags_of, unit_of

NM = shutil.which("nm")
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

needs_nm = pytest.mark.skipif(NM is None, reason="needs nm")
needs_compiler = pytest.mark.skipif(
    COMPILER is None or NM is None or not LISTED.exists(),
    reason="needs a compiler, nm and the sources",
)
pytestmark = pytest.mark.needs("fused")


def native() -> Path:
    return Path(str(find_spec("regard._fused").origin))


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(kind, name) of each symbol; an upper-case kind is global, W and V are weak, u is unique."""
    process = subprocess.run(
        [NM, *options, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    lines = (line.rsplit(maxsplit=2) for line in process.stdout.splitlines())
    found = [(line[-2], line[-1]) for line in lines if len(line) >= 2]
    # Those of the address sanitizer are its own affair.
    return [(kind, name) for kind, name in found if "__odr_asan" not in name]


@needs_nm
def test_the_module_exports_nothing_but_its_initialisation():
    exported = [name for _, name in symbols(native(), "-D", "--defined-only")]
    assert exported == ["PyInit__fused"]


@needs_nm
def test_the_module_does_not_load_what_changes_floating_point_for_everybody():
    process = subprocess.run([NM, str(native())], capture_output=True, text=True, timeout=60)
    assert "set_fast_math" not in process.stdout


def units() -> list[str]:
    return sorted(path.stem.removeprefix("target_") for path in UNITS.glob("target_*.cpp"))


@needs_compiler
def test_the_flags_of_the_build_never_let_the_compiler_change_results():
    for target in units():
        given = flags_of(target)
        assert "-ffp-contract=off" in given
        assert "-fno-lto" in given
        assert not {"-ffast-math", "-Ofast", "-funsafe-math-optimizations"} & set(given)
        assert "-fassociative-math" not in given


def compiled(target: str, level: str) -> Path:
    try:
        return unit_of(str(COMPILER), target, level)
    except RuntimeError as error:
        if "unrecognized" in str(error):
            pytest.skip(f"this compiler does not know {target}")
        raise


each_target = pytest.mark.parametrize("target", units() if LISTED.exists() else [])


@pytest.mark.full  # compiling takes six seconds
@needs_compiler
@each_target
def test_a_unit_of_a_target_has_one_global_symbol_and_no_weak_one(target):
    # Unoptimised, nothing is inlined: whatever the linker might share shows.
    found = symbols(compiled(target, "-O0"), "--defined-only")
    shown = [(kind, name) for kind, name in found if kind.isupper() or kind in "uvw"]
    assert [name for _, name in shown] == [f"regard_target_{target}"], shown
    assert not {kind for kind, _ in shown} & set("WVuvw")


@pytest.mark.full
@needs_compiler
@each_target
def test_a_unit_of_a_target_has_no_static_initialiser(target):
    unit = compiled(target, "-O1")
    names = [name for _, name in symbols(unit)]
    assert f"regard_target_{target}" in names
    assert not [
        name for name in names if "_GLOBAL__sub_I" in name or "__cxx_global_var_init" in name
    ]
    # Nor does it need anything that allocates, throws, prints or aborts.
    needed = {name for kind, name in symbols(unit, "--undefined-only")}
    assert not {
        name for name in needed if re.match(r"_Zn[wa]|malloc|free|__cxa_|printf|abort", name)
    }
