"""The command that lists mistakes, shows one, and is named by a diagnosis."""

from __future__ import annotations

import re

import pytest

import regard
from commands import CliRunner
from regard.cli import app
from regard.diagnosis.mistakes import all_mistakes
from regard.tour import broken
from regard.views.diagnosis.story import tell


def call(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["mistakes", *words], env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert done.exit_code == code
    return done.output


def test_every_mistake_is_listed_with_its_title():
    listed = " ".join(call().split())
    for mistake in all_mistakes().values():
        assert f"{mistake.name} {' '.join(mistake.title.split())}" in listed


# One of each kind: plain, in words alone, of positions, of gradients, of blocks.
@pytest.mark.parametrize(
    "name",
    [
        "scale_by_width",
        "state_kept",
        "rotary_sign_lost",
        "delta_forgotten",
        "block_output_not_rescaled",
    ],
)
def test_a_mistake_is_shown_with_what_to_write_instead(name):
    shown = call(name)
    mistake = all_mistakes()[name]
    first, *_ = shown.splitlines()
    assert first.lower() == mistake.title.lower()
    assert " ".join(mistake.numpy.split()) in " ".join(shown.split())
    assert shown.endswith(f"reference/mistakes/{name}.html\n")


def test_a_name_that_is_none_is_refused_with_the_nearest():
    assert re.fullmatch(
        r"regard: error: scale_by_widht: .* did you mean scale_by_width\? .*\n",
        call("scale_by_widht", code=2),
    )


def test_a_diagnosis_names_commands_that_show_its_mistakes():
    story = tell(regard.diagnose(broken))
    assert story.more == ("regard mistakes scale_by_width",)
    assert call(*story.more[0].split()[2:])
