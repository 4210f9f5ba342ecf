"""What CHANGELOG.md says of a release: `python .ci/release_notes.py v0.1.0`.

An error where the tag has no section of its own, or CITATION.cff names another version.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def notes(tag: str, changelog: str, citation: str) -> str:
    """The section of a tag such as v0.1.0, whose heading is `## 0.1.0`, perhaps with a date."""
    version = tag.removeprefix("v")
    if not tag.startswith("v") or not re.fullmatch(r"\d+(\.\d+)+((a|b|rc)\d+)?", version):
        raise SystemExit(f"{tag} is no tag of a release; one is v0.1.0 or v0.2.0rc1")
    cited = re.findall(r"^version: (\S+)$", citation, re.MULTILINE)
    if cited != [version]:
        raise SystemExit(f"CITATION.cff has version {', '.join(cited)}, and the tag {version}")
    sections = re.split(r"^## (.+)$", changelog, flags=re.MULTILINE)
    found = [
        text.strip()
        for heading, text in zip(sections[1::2], sections[2::2], strict=True)
        if heading.split()[0] == version
    ]
    if len(found) != 1 or not found[0]:
        raise SystemExit(f"CHANGELOG.md has {len(found)} sections '## {version}'; it must have one")
    return found[0]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(
        notes(
            sys.argv[1], *((ROOT / n).read_text("utf-8") for n in ("CHANGELOG.md", "CITATION.cff"))
        )
    )
