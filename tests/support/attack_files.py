"""Readers of files under attack: valid files of each kind, and what a reader may do with others.

A reader gives a value, or one of regard's errors in one line that names the file. It raises nothing
else, keeps to some seconds and a gigabyte, writes nothing and opens no other file. Must not know
how a file was damaged.
"""

from __future__ import annotations

import io
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import regard
import tiny_bert
import tiny_decoder
from places import ROOT
from regard.bench.compare import read_run
from regard.boundary.toml_json import spell
from regard.cli.on_disk import load_npy
from regard.diagnosis.process.target import code_cells
from regard.errors import RegardError, safe_text
from regard.problems.files import load_target
from regard.problems.schema import mapping_from_problem

MOST_SECONDS = 5.0  # of computing: what else runs on the machine does not count
MOST_BYTES = 2**30
LONGEST_MESSAGE = 2000


class Reader(NamedTuple):
    """One kind of file: its name in a folder, how it is built, valid examples, who reads it."""

    file: str
    kind: str  # of which structure: json, toml, npz, npy, safetensors, gguf, text
    seeds: Callable[[Path], list[bytes]]  # `folder` has the files beside it
    read: Callable[[Path], Any]


# --- valid files ---------------------------------------------------------------------------------


def _problems() -> list[regard.Problem]:
    paths = sorted((ROOT / "examples").glob("*.toml"))
    small = [path for path in paths if path.stat().st_size < 6000]
    return [regard.load_problem(path) for path in small]


def _saved(suffix: str) -> Callable[[Path], list[bytes]]:
    def seeds(folder: Path) -> list[bytes]:
        path, found = folder / f"seed{suffix}", []
        for problem in _problems():
            regard.save_problem(problem, path, force=True)
            found.append(path.read_bytes())
        path.unlink()
        return found

    return seeds


def _caches(folder: Path) -> list[bytes]:
    rng, found = np.random.default_rng(0), []
    given: list[dict[str, Any]] = [{}, {"window": (4, 0)}, {"dtype": "int8"}, {"capacity": 9}]
    for options in [*given, {"positions": regard.positions.Rotary()}]:
        cache = regard.KVCache(**options)
        cache.append(*rng.normal(size=(2, 1, 2, 3, 4)).astype(np.float32))
        cache.save(folder / "seed.npz")
        found.append((folder / "seed.npz").read_bytes())
        (folder / "seed.npz").unlink()
    return found


def _arrays(folder: Path) -> list[bytes]:
    found = []
    for array in (np.arange(6.0).reshape(2, 3), np.zeros((1, 2, 2), "<f2"), np.ones(3, bool)):
        file = io.BytesIO()
        np.save(file, array)
        found.append(file.getvalue())
    return found


def _own(name: str, *texts: str) -> Callable[[Path], list[bytes]]:
    """The file of the model that is in the folder, and other texts."""

    def seeds(folder: Path) -> list[bytes]:
        path = folder / name
        return [text.encode() for text in texts] + ([path.read_bytes()] if path.exists() else [])

    return seeds


RUN = """{"machine": {"cpu": "a", "architecture": "x", "system": "Linux", "threads": 2,
"target": "avx2", "python": "3", "blas": "none"}, "versions": {"regard": "0.1"}, "cases": [{"name":
"one", "operations": 12, "sides": {"regard": {"seconds": 0.1, "rounds": [0.1, 0.2]}}}]}"""
INDEX = """{"metadata": {"total_size": 8}, "weight_map": {"embeddings.word_embeddings.weight":
"model-1.safetensors"}}"""
MODULES = """[{"path": "", "type": "sentence_transformers.models.Transformer"},
{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
{"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]"""
POOLING = '{"pooling_mode_mean_tokens": true, "pooling_mode": ["cls"], "include_prompt": true}'
LIMITS = '{"max_seq_length": 8, "do_lower_case": false}'
PROMPTS = '{"prompts": {"query": "the "}, "default_prompt_name": "query"}'
WORDING = '{"do_lower_case": true, "strip_accents": null, "tokenize_chinese_chars": false}'


# --- readers -------------------------------------------------------------------------------------


def _read_problem(path: Path) -> None:
    """What was read can be written as text, and read again it is the same text."""
    problem = regard.load_problem(path)
    repr(problem)
    try:
        text = spell(mapping_from_problem(problem), "json")
    except RegardError:
        return  # more than text may hold
    again = regard.problems.files.parse_problem(text, "json")
    assert spell(mapping_from_problem(again), "json") == text, "it changes when it is written"


def _read_target(path: Path) -> None:
    load_target(_example(), path)


@cache
def _example() -> regard.Problem:
    return regard.load_problem("she-likes-coffee")


def _read_cache(path: Path) -> None:
    cache = regard.KVCache.load(path)
    repr(cache)
    assert cache.keys.shape[:-1] == cache.values.shape[:-1]


def _read_array(path: Path) -> None:
    load_npy(str(path)).tobytes()


def _read_model(path: Path) -> None:
    folder = path.parent.parent if path.parent.name == "1_Pooling" else path.parent
    encoder = regard.models.load(folder)
    with np.errstate(all="ignore"):
        encoder.encode(["the cat sat on the mat.", ""], truncate=True)
        encoder.hidden_states("cats wait", truncate=True)


def _read_decoder(path: Path) -> None:
    """A decoder of a directory or of a GGUF file reads and writes a few tokens."""
    model = regard.models.load(path if path.suffix == ".gguf" else path.parent)
    with np.errstate(all="ignore"):
        model.generate("the cat", max_new_tokens=2, temperature=1.0)


def _gguf(folder: Path) -> list[bytes]:
    return [
        tiny_decoder.write_gguf(folder / "m.gguf", config).read_bytes()
        for config in tiny_decoder.CONFIGS.values()
    ]


def _read_zarr(path: Path) -> None:
    from regard.interop import zarr_files

    array = zarr_files.open_array(str(path.parent))
    zarr_files.read(str(path.parent), array, (slice(0, 1),) * len(array.shape))


NOTEBOOK = '{"cells": [{"cell_type": "code", "source": ["x = 1\\n", "%time y"]}], "nbformat": 4}'

READERS = {
    "problem_toml": Reader("p.toml", "toml", _saved(".toml"), _read_problem),
    "problem_json": Reader("p.json", "json", _saved(".json"), _read_problem),
    "problem_npz": Reader("p.npz", "npz", _saved(".npz"), _read_problem),
    "target": Reader(
        "t.json", "json", _own("t.json", "[[1, 2, 3, 4], [3, 4, 5, 6], [5, 6, 7, 8]]"), _read_target
    ),
    "cache": Reader("c.npz", "npz", _caches, _read_cache),
    "array": Reader("a.npy", "npy", _arrays, _read_array),
    "config": Reader("config.json", "json", _own("config.json"), _read_model),
    "weights": Reader("model.safetensors", "safetensors", _own("model.safetensors"), _read_model),
    "index": Reader("model.safetensors.index.json", "json", _own("none", INDEX), _read_model),
    "tokenizer": Reader("tokenizer.json", "json", _own("tokenizer.json"), _read_model),
    "vocabulary": Reader("vocab.txt", "text", _own("vocab.txt"), _read_model),
    "wording": Reader("tokenizer_config.json", "json", _own("none", WORDING), _read_model),
    "modules": Reader("modules.json", "json", _own("none", MODULES), _read_model),
    "pooling": Reader("1_Pooling/config.json", "json", _own("none", POOLING), _read_model),
    "limits": Reader("sentence_bert_config.json", "json", _own("none", LIMITS), _read_model),
    "prompts": Reader(
        "config_sentence_transformers.json", "json", _own("none", PROMPTS), _read_model
    ),
    "gguf": Reader("m.gguf", "gguf", _gguf, _read_decoder),
    "decoder_config": Reader("config.json", "json", _own("config.json"), _read_decoder),
    "decoder_weights": Reader(
        "model.safetensors", "safetensors", _own("model.safetensors"), _read_decoder
    ),
    "decoder_tokens": Reader("tokenizer.json", "json", _own("tokenizer.json"), _read_decoder),
    "run": Reader("run.json", "json", _own("none", RUN), lambda path: read_run(str(path))),
    "notebook": Reader("n.ipynb", "json", _own("none", NOTEBOOK), code_cells),
}
if find_spec("zarr"):
    READERS["zarr"] = Reader("a.zarr/zarr.json", "json", _own("a.zarr/zarr.json"), _read_zarr)


def prepare(name: str, folder: Path) -> list[bytes]:
    """Put beside a file what its reader needs, and return valid examples of the file."""
    reader = READERS[name]
    if reader.read is _read_model:
        from tokenizers import BertWordPieceTokenizer

        tiny_bert.write(folder)
        words = str(folder / "vocab.txt")
        BertWordPieceTokenizer(words).save(str(folder / "tokenizer.json"), pretty=False)
    if reader.read is _read_decoder:
        tiny_decoder.write(folder)
    if name == "zarr":
        import zarr

        array = zarr.create_array(folder / "a.zarr", shape=(4, 3), chunks=(2, 3), dtype="f4")
        array[:] = 1
    found = reader.seeds(folder)
    if name == "index":
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        names = ", ".join(f'"{one}": "model-1.safetensors"' for one in tiny_bert.shapes())
        found.append(f'{{"weight_map": {{{names}}}}}'.encode())
    if name in ("vocabulary", "wording"):
        (folder / "tokenizer.json").unlink(missing_ok=True)
    if name == "pooling":
        (folder / "modules.json").write_text(MODULES)
    if name == "modules":
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(POOLING)
    (folder / reader.file).parent.mkdir(exist_ok=True)
    return found


# --- the verdict ---------------------------------------------------------------------------------

ONLY_READING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
FORBIDDEN = {
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen"),
    *("socket.connect", "socket.bind", "pickle.find_class", "ctypes.dlopen", "shutil.rmtree"),
}
LIBRARIES = [Path(one).resolve() for one in (sys.prefix, sys.base_prefix, ROOT)]


class Watch:
    """What a process does beside computing, while it is on; Python cannot take the hook away."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self.notice)

    def notice(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in FORBIDDEN:
            self.seen.append(event)
        elif event == "open":
            path, mode, flags = arguments
            if isinstance(path, int):
                return
            place = Path(os.fsdecode(path)).resolve()
            inside = any(map(place.is_relative_to, (self.folder, *LIBRARIES)))
            if not inside or flags & ONLY_READING or (mode and set(mode) & set("wax+")):
                self.seen.append(f"open {safe_text(path, 100)} {mode} {flags}")

    @contextmanager
    def on(self, folder: Path) -> Iterator[None]:
        self.seen.clear()
        self.folder = folder.resolve()
        try:
            yield
        finally:
            self.folder = None


_watch: list[Watch] = []


def verdict(name: str, data: bytes, folder: Path) -> str:
    """What is wrong with what a reader makes of these bytes; "" if nothing is."""
    if not _watch:
        _watch.append(Watch())
        _example()
    reader, wrong = READERS[name], ""
    path = folder / reader.file
    path.write_bytes(data)
    before = sorted(os.listdir(folder))
    begin = time.process_time()
    with warnings.catch_warnings(), _watch[0].on(folder):
        warnings.simplefilter("error")
        try:
            reader.read(path)
        except RegardError as error:
            wrong = _message(str(error), folder)
        except Exception as error:
            wrong = describe(error)
    took = time.process_time() - begin
    if took > MOST_SECONDS:
        wrong = wrong or f"takes {took:.1f} s"
    if _watch[0].seen:
        wrong = wrong or f"does what no reader may: {_watch[0].seen[0]}"
    if sorted(os.listdir(folder)) != before:
        wrong = wrong or "writes a file"
    return wrong


def _message(text: str, folder: Path) -> str:
    if "needs more memory than there is" in text:
        return "takes more memory than a gigabyte"
    if folder.name not in text:
        return f"a message that names no file: {safe_text(text, 200)}"
    if safe_text(text) != text or len(text) > LONGEST_MESSAGE:
        return f"a message that is not one short line: {safe_text(text, 200)}"
    return ""


def describe(error: BaseException) -> str:
    """An exception and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.name}"
    return f"{type(error).__name__} in {where}: {safe_text(error, 160)}"


def fault(wrong: str) -> str:
    """What two files that show the same fault have in common."""
    return wrong.partition(":")[0]
