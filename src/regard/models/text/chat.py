"""The template of a conversation, which a model's files bring along, in a process of its own.

A template is a program of a stranger: it runs in jinja2's immutable sandbox, where it reaches no
attribute of Python's, and in a process whose memory, time and output are limited. Must not know
models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regard.boundary.files import about, decode, read_file
from regard.boundary.parse import check_text
from regard.errors import DtypeError, ProblemError, safe_text
from regard.models.files.safetensors import read_table
from regard.models.text.tokenizer import SETTINGS

MAX_TEMPLATE = 2**18
MAX_OUTPUT = 2**22
MAX_MEMORY = 2**29
MAX_SECONDS = 10  # of CPU time; a template needs milliseconds

_WORKER = """
import json, sys
try:
    import resource
except ImportError:
    pass
else:
    memory, seconds = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
given = json.load(sys.stdin)
def refuse(message):
    raise TemplateError(message)
def tojson(value, indent=None):
    return json.dumps(value, ensure_ascii=False, indent=indent)
room = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
room.filters["tojson"] = tojson
room.globals["raise_exception"] = refuse
made, size = [], 0
try:
    for piece in room.from_string(given.pop("template")).generate(**given):
        size += len(piece)
        if size > int(sys.argv[3]):
            raise TemplateError(f"makes more than {sys.argv[3]} characters")
        made.append(piece)
    answer = {"text": "".join(made)}
except MemoryError:
    answer = {"error": "needs too much memory"}
except Exception as error:
    answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
json.dump(answer, sys.stdout)
"""


@dataclass(frozen=True)
class Template:
    """A chat template and the file that has it; `names` are special tokens that it may write."""

    path: str
    text: str
    names: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
        """The text of a conversation, up to where the model has to go on."""
        given = {"messages": _checked(messages), "add_generation_prompt": True, **self.names}
        with about(self.path):
            if len(self.text) > MAX_TEMPLATE:
                raise ProblemError(
                    f"has a chat template of {len(self.text)} characters; at most {MAX_TEMPLATE} "
                    "are read"
                )
            return _rendered(json.dumps({**given, **options, "template": self.text}))


def _rendered(given: str) -> str:
    limits = [str(number) for number in (MAX_MEMORY, MAX_SECONDS, MAX_OUTPUT)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _WORKER, *limits],
            input=given.encode("utf-8", "surrogatepass"),
            capture_output=True,
            timeout=6 * MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ProblemError("has a chat template that takes too long") from None
    if b"No module named 'jinja2'" in done.stderr:
        raise ProblemError('has a chat template, which needs jinja2; pip install "regard[models]"')
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ProblemError(
            f"has a chat template that needs more than {MAX_SECONDS} s or {MAX_MEMORY // 2**20} MiB"
        ) from None
    if "error" in answer:
        raise ProblemError(f"has a chat template that fails: {safe_text(answer['error'], 300)}")
    return str(answer["text"])


def _checked(messages: Any) -> list[dict[str, str]]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise DtypeError(
            'messages must be a list such as [{"role": "user", "content": "Hello"}], not '
            f"{safe_text(repr(messages), 60)}"
        )
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise DtypeError(f"message {number} must have exactly role and content")
        found.append({k: check_text(f"{k} of message {number}", message[k]) for k in message})
    return found


def template_of(folder: str) -> Template | None:
    """The template of a model's directory, if it has one."""
    path, table = read_table(folder, SETTINGS, needed=False)
    text = table.get("chat_template")
    if isinstance(text, list):  # several, each with a name
        named = {one.get("name"): one.get("template") for one in text if isinstance(one, dict)}
        text = named.get("default")
    own = os.path.join(folder, "chat_template.jinja")
    if os.path.lexists(own):
        path = own
        with about(path):
            text = decode(read_file(path, MAX_TEMPLATE))
    if text is None:
        return None
    with about(path):
        check_text("chat_template", text)
    names = {name: _spelled(table.get(name)) for name in ("bos_token", "eos_token")}
    return Template(path, text, {name: one for name, one in names.items() if one is not None})


def _spelled(token: Any) -> str | None:
    """A special token, which is a text or a table with one."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
