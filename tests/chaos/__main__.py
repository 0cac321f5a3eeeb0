"""All attacks at scale, each in a process of its own, one after another: `make chaos`.

python -m tests.chaos --minutes 60 --seed 1 --output docs/results
python -m tests.chaos kills disk
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SHARES = {"soak": 8, "requests": 9, "groups": 6, "disk": 7, "pauses": 5, "engines": 7, "kills": 18}
"""Minutes of an hour for each attack. What one does not need goes to those after it, and the kills come last."""
WITH_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")
"""Before the attack that mounts a small file system: it needs no root then, and leaves nothing mounted."""
SHOWN_CHARACTERS = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attacks. Returns 1 if one of them has found a problem."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Attack runs and servers at scale.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHARES)} (default: all)")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all attacks together (default: 60)")
    parser.add_argument("--seed", type=int, help="of every random choice (default: random, and printed)")
    parser.add_argument("--output", type=Path, help="folder of the JSON files")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(SHARES):
        parser.error(f"{', '.join(sorted(unknown))}: must be of {', '.join(SHARES)}")
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    names = [name for name in SHARES if name in options.names or not options.names]
    print(f"seed {seed}", flush=True)
    until = time.monotonic() + 60 * options.minutes
    failed = []
    for number, name in enumerate(names):
        share = SHARES[name] / sum(SHARES[later] for later in names[number:])
        command = [sys.executable, "-m", "tests.chaos.trial", name, "--seed", str(seed)]
        command += ["--seconds", f"{max(0.0, share * (until - time.monotonic())):.0f}"]
        command += [] if options.output is None else ["--output", str(options.output)]
        if _fails([*(WITH_MOUNTS if name == "disk" else ()), *command]):
            failed.append(name)
    print(f"problems found by: {', '.join(failed)}" if failed else "no problems found", flush=True)
    return int(bool(failed))


def _fails(command: Sequence[str]) -> bool:
    """Run one attack. Its stderr, where libraries warn and report leaks, is shown only if it fails."""
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        code = subprocess.run(command, stderr=stderr).returncode
        if code != 0:
            stderr.seek(0)
            print(stderr.read()[-SHOWN_CHARACTERS:], flush=True)
    return code != 0


if __name__ == "__main__":
    sys.exit(main())
