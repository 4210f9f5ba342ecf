"""`regard generate`: the text to standard output, how fast it was to standard error."""

from __future__ import annotations

import re

import pytest

import regard
import tiny_bert
import tiny_decoder
from commands import CliRunner
from regard.cli import app

pytestmark = [pytest.mark.needs("safetensors"), pytest.mark.needs("tokenizers")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_decoder.write(tmp_path_factory.mktemp("tiny") / "gpt2", tiny_decoder.GPT2)


def run(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_it_prints_the_text_and_what_the_model_writes_after_it(folder):
    made = regard.models.load(folder).generate("the cat", max_new_tokens=6)
    done = run(folder, "--text", "the cat", "--max-new-tokens", 6)
    assert done.exit_code == 0, done.output
    written = "\n".join(regard.errors.safe_text(line) for line in made.text.split("\n"))
    assert done.stdout == f"the cat{written}\n"
    assert re.search(
        r"loaded in .* s, first text after .* s, 6 tokens.*ended by length", done.stderr
    )


def test_a_message_is_read_by_the_template(folder):
    model = regard.models.load(folder)
    made = model.chat(
        [{"role": "user", "content": "Hi"}], max_new_tokens=4, temperature=1.0, seed=2
    )
    done = run(
        folder, "--chat", "--text", "Hi", "--max-new-tokens", 4, "--temperature", 1, "--seed", 2
    )
    written = "\n".join(regard.errors.safe_text(line) for line in made.text.split("\n"))
    assert done.stdout == f"{written}\n"


def test_what_cannot_write_is_refused_in_one_line(folder, tmp_path):
    encoder = tiny_bert.write(tmp_path / "bert")
    for arguments, said in (
        ((encoder, "--text", "a"), "is an encoder, which writes no text"),
        ((tmp_path / "none", "--text", "a"), "does not exist"),
        ((folder, "--text", "the cat " * 40), "but the model takes 40"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2
        assert said in done.stderr
        assert done.stderr.count("\n") == 1


def test_one_head_of_a_language_model_is_explained(folder):
    arguments = ["explain", "--model", str(folder), "--text", "the cat"]
    done = CliRunner().invoke(app, [*arguments, "--layer", "1", "--head", "2", "--step", "weights"])
    assert done.exit_code == 0, done.output
    assert "P = Y / z" in done.stdout
    without = CliRunner().invoke(app, arguments)
    assert without.exit_code == 2
    assert "--layer 0" in without.stderr
