"""Rebuild report.html of a finished, killed or still training run: colocated-grpo report RUN"""

import sys
from collections.abc import Sequence

from colocated_grpo.runtime.program import OneLineParser
from colocated_grpo.runtime.run_folder import is_locked
from colocated_grpo.tracking import files, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and print its path. Returns exit code 0, or 2 if the run cannot be read."""
    parser = OneLineParser(prog="colocated-grpo report", description="Rebuild report.html of a run.")
    parser.add_argument("run", help="run folder")
    options = parser.parse_args(arguments)
    try:
        folder = files.run_folder(options.run)
        print(report.write_report(folder, running=is_locked(folder)))
    except files.RunFolderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
