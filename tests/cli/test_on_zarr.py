"""`regard attention` over Zarr as a shell meets it: workers, schedulers, faults, what is said."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import regard
from commands import CliRunner
from regard.cli import app

zarr = pytest.importorskip("zarr")
pytestmark = [pytest.mark.needs("zarr", "fused")]
PATIENCE = 120  # seconds


def full(test):
    """A test with real processes, for the full tier."""
    for mark in (
        pytest.mark.full,
        pytest.mark.needs("distributed"),
        pytest.mark.skipif(os.name != "posix", reason="signals are POSIX"),
    ):
        test = mark(test)
    return test


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def stored(rows=300, keys=700, heads=2):
    rng = np.random.default_rng(0)
    arrays = {}
    for name, length in (("q", rows), ("k", keys), ("v", keys)):
        arrays[name] = rng.normal(size=(heads, length, 32)).astype("f4")
        made = zarr.create_array(
            f"{name}.zarr", shape=arrays[name].shape, chunks=(1, 1024, 32), dtype="f4"
        )
        made[...] = arrays[name]
    return list(arrays.values())


COMMAND = ("attention", "q.zarr", "k.zarr", "v.zarr", "-o", "o.zarr")


def call(*words):
    return CliRunner().invoke(app, [*COMMAND, *words])


def numbers(name="o.zarr"):
    return zarr.open_array(name, mode="r")[...]


def test_options_are_those_of_the_function_and_results_are_named():
    arrays = stored()
    made = call(
        "--causal", "--offset", "end", "--lse", "l.zarr", "--softcap", "2", "--threads", "1"
    )
    assert (made.exit_code, made.stderr) == (0, "")
    assert made.stdout.splitlines() == [
        "o.zarr: output (2, 300, 32) float32",
        "l.zarr: lse (2, 300) float32",
    ]
    one = regard.attention(*arrays, causal=True, offset="end", softcap=2.0, return_lse=True)
    np.testing.assert_array_equal(numbers(), one.output)
    np.testing.assert_array_equal(numbers("l.zarr"), one.lse)


def test_a_run_that_was_stopped_says_what_it_keeps(monkeypatch):
    from regard.interop.zarr_files import Output

    arrays = stored()
    real, calls = Output.write, []

    def interrupted(self, where, array):
        calls.append(where)
        if len(calls) > 3:
            raise KeyboardInterrupt
        real(self, where, array)

    with monkeypatch.context() as patch:
        patch.setattr(Output, "write", interrupted)
        made = call("--chunks", "1", "100", "256")
    assert made.exit_code == 130
    assert "attention was interrupted; the same command goes on from o.zarr.part" in made.stderr
    refused = call("--causal", "--offset", "0")
    assert refused.exit_code == 2
    assert re.fullmatch(
        r"regard: error: o\.zarr\.part: .*pass --force to begin.*\n", refused.stderr
    )
    made = call()
    assert made.exit_code == 0
    assert made.stderr == "3 of 6 blocks were whole and kept\n"
    np.testing.assert_array_equal(numbers(), regard.attention(*arrays))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weights", "w.zarr"], "--weights has no effect with OUT.zarr"),
        (["--kernel", "reference"], "--kernel has no effect with OUT.zarr"),
        (["--workers", "2", "--scheduler", "tcp://127.0.0.1:1"], "give one"),
        (["--workers", "0"], "--workers"),
        (["--chunks", "1", "100", "0"], "chunks is 0"),
        (["--max-memory", "1kB"], "memory is 1000"),
        (["--mask", "q.zarr"], "mask must be boolean"),
        (["--bias", "m.npy"], "m.npy: is not a Zarr array"),
        (["-o", "q.zarr", "--force"], "would replace the input q.zarr"),
        (["-o", "o.npy", "--workers", "2"], "--workers goes with -o OUT.zarr only"),
        (["-o", "o.npy", "--chunks", "1", "2", "3"], "--chunks goes with -o OUT.zarr only"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(words, message):
    stored()
    np.save("m.npy", np.ones((300, 700), np.float32))
    before = sorted(os.listdir())
    made = call(*words)
    assert made.exit_code == 2
    (line,) = made.stderr.splitlines()
    assert message in line
    assert sorted(os.listdir()) == before


@pytest.mark.needs("distributed")
def test_a_block_that_ends_every_worker_is_one_line(monkeypatch):
    import distributed

    from regard.cli import on_zarr

    def submit(task, block, pure):
        future = Future()
        future.set_exception(distributed.KilledWorker("make", None, 3))
        return future

    client = SimpleNamespace(nthreads=lambda: {"one": 1}, submit=submit)
    monkeypatch.setattr(on_zarr, "_cluster", lambda *words: nullcontext(client))
    stored()
    made = call("--workers", "1")
    assert made.exit_code == 2
    assert re.fullmatch(r"regard: error: a block ended 4 workers, .*--max-memory.*\n", made.stderr)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_shows_blocks_their_speed_and_the_time_left(monkeypatch):
    from regard.cli import frame
    from regard.interop.zarr import Progress

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    now = 0.0
    with frame.progress_bar(clock=lambda: now) as watch:
        for blocks in range(2, 6):
            now += 4
            watch(Progress(blocks=blocks, of=6, kept=2, bytes=(blocks - 2) * 10**9))
    last = re.findall(r"[^\r\n]*blocks[^\r\n]*", screen.getvalue())[-1]
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last)
    # Three blocks of 1 GB in 16 seconds; the one that is left takes as long as one took since the
    # first was seen.
    assert re.fullmatch(r"5/6 blocks .* 0\.19 GB/s, left: 0:00:04 *", plain)


# --- faults, with real processes --------------------------------------------------------------


HEARS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@contextmanager
def started(*words, **more):
    """A process, which is ended; it hears an interrupt even in the background of a shell."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = (sys.executable, "-c", HEARS, *words)
    child = subprocess.Popen(words, start_new_session=True, **pipes | more)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def slow(*words):
    """A run of 32 blocks that takes some seconds."""
    return started("-m", "regard", *COMMAND, "--precision", "exact", *CUT, *words)


CUT = ("--chunks", "1", "512", "4096")


def until(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def chunks(folder="o.zarr.part"):
    return [path for path in Path(folder, "c").rglob("*") if path.name.isdigit() and path.is_file()]


def some_are_there(number):
    until(lambda: len(chunks()) >= number, f"{number} chunks")


def ended(child):
    out, said = child.communicate(timeout=PATIENCE)
    return child.returncode, out.decode(), said.decode()


def whole(arrays):
    """Whether the output has the bytes of one call; nothing unfinished is left."""
    assert not os.path.lexists("o.zarr.part")
    np.testing.assert_array_equal(numbers(), regard.attention(*arrays, precision="exact"))
    assert len(chunks("o.zarr")) == 32


def workers_of(child):
    """The processes that compute for a command."""
    import psutil

    below = psutil.Process(child.pid).children(recursive=True)
    return [one for one in below if "spawn_main" in " ".join(one.cmdline())]


def goes_on(arrays):
    """The same command again: it keeps what is whole, and ends with the bytes of one call."""
    assert not os.path.lexists("o.zarr")
    with slow("--workers", "2") as child:
        code, _, said = ended(child)
    assert code == 0, said
    kept = re.search(r"(\d+) of 32 blocks were whole and kept", said)
    assert 0 < int(kept[1]) < 32
    whole(arrays)


@contextmanager
def scheduler():
    """A scheduler of a user's own: its process, its address, and what starts one of its workers."""
    part = ("-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0")
    where, quiet = Path("where.json"), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started(*part, "--no-dashboard", "--scheduler-file", str(where), **quiet) as process:
        until(where.exists, "the scheduler")
        time.sleep(0.5)
        address = json.loads(where.read_text())["address"]
        worker = ("-m", "distributed.cli.dask_worker", address, "--no-dashboard", "--nthreads", "1")
        # Workers need not be where the command is.
        yield process, address, partial(started, *worker, **quiet, cwd="/")


@full
def test_a_scheduler_that_is_lost_is_one_line_and_the_same_command_goes_on():
    arrays = stored(8192, 8192)
    with (
        scheduler() as (process, address, worker),
        worker(),
        worker(),
        slow("--scheduler", address) as c,
    ):
        some_are_there(4)
        process.kill()
        code, _, said = ended(c)
    assert code == 2
    assert re.fullmatch(
        r"regard: error: o\.zarr: is not finished: the workers were lost; \d+ of 32 blocks are in "
        r"o\.zarr\.part, and the same call goes on from there\n",
        said,
    )
    goes_on(arrays)


@full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [(), ("--workers", "2")])
def test_a_command_that_is_ended_goes_on(number, words):
    arrays = stored(8192, 8192)
    with slow(*words) as child:
        some_are_there(4)
        workers = workers_of(child)
        if number == signal.SIGINT:  # as a terminal sends it, to all
            os.killpg(child.pid, number)
        else:
            os.kill(child.pid, number)
        code, _, said = ended(child)
        until(lambda: not any(one.is_running() for one in workers), "workers that end")
    if number == signal.SIGINT:
        assert code == 130
        assert said.strip() == (
            "regard: attention was interrupted; the same command goes on from o.zarr.part"
        )
    goes_on(arrays)


@full
def test_workers_that_are_killed_stopped_or_lost_change_no_byte():
    arrays = stored(8192, 8192)
    with slow("--workers", "2") as child:
        for number, fault in ((3, signal.SIGKILL), (10, signal.SIGSTOP), (18, signal.SIGKILL)):
            some_are_there(number)
            one = workers_of(child)[0]
            one.send_signal(fault)
            if fault == signal.SIGSTOP:
                time.sleep(3)
                one.send_signal(signal.SIGCONT)
        code, _, said = ended(child)
    assert (code, said.count("error")) == (0, 0), said
    whole(arrays)


@full
def test_a_worker_that_comes_late_goes_on_while_another_is_paused():
    arrays = stored(8192, 8192)
    with (
        scheduler() as (_, address, worker),
        worker() as first,
        slow("--scheduler", address) as child,
    ):
        some_are_there(3)
        with worker():
            os.killpg(first.pid, signal.SIGSTOP)
            end, already = time.monotonic() + 10, len(chunks())
            some_are_there(already + 2)  # one may have been on its way to the disk
            time.sleep(max(0.0, end - time.monotonic()))
            assert child.poll() is None  # a block is left to the one that is paused
            os.killpg(first.pid, signal.SIGCONT)
            code, _, said = ended(child)
    assert code == 0, said
    whole(arrays)


@full
def test_a_full_disk_is_one_line_and_what_is_whole_is_kept():
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    arrays = stored(8192, 8192)
    here = os.getcwd()
    os.mkdir("small")
    mount = ("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "small")
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this system mounts nothing")
    try:
        for name in "qkv":
            os.symlink(Path(here, f"{name}.zarr"), f"small/{name}.zarr")
        os.chdir("small")
        for words in ((), ("--workers", "2")):
            with slow(*words) as child:
                code, _, said = ended(child)
            assert code == 2
            assert said.count("\n") == 1
            assert "o.zarr: is not finished: No space left on device" in said
            assert not os.path.lexists("o.zarr")
        subprocess.run(("mount", "-o", "remount,size=9m", "."), check=True)
        goes_on(arrays)
    finally:
        os.chdir(here)
        subprocess.run(("umount", "small"), check=True)


@full
def test_workers_listen_to_this_machine_only():
    import psutil

    stored(8192, 8192)
    with slow("--workers", "2") as child:
        some_are_there(1)
        processes = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        open_ = [one for process in processes for one in process.net_connections("inet")]
        heard = {one.laddr.ip for one in open_ if one.status == psutil.CONN_LISTEN}
        met = {one.raddr.ip for one in open_ if one.raddr}
    assert heard == met == {"127.0.0.1"}
