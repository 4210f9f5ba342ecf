"""The command `regard`, also as `python -m regard`.

Owns what happens before the command line is there: importing takes a while, and Ctrl-C ends that
as quietly as anything else.
"""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from regard.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
