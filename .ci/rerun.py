#!/usr/bin/env python3
"""Runs the tests, then runs the failed tests again. A test that passes only the second time is reported as flaky.

    .ci/rerun.py TEST COMMAND … -- RERUN COMMAND …

The test command runs all tests with pytest. The rerun command runs only the failed tests (pytest --last-failed).
The exit code is 0 if all failed tests passed in the rerun. The flaky tests are also listed in out/flaky.txt.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
REPORT = Path("out/flaky.txt")


def failed() -> list[str]:
    """Return the IDs of the tests that failed in the last pytest run."""
    return sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []


def main(first: list[str], second: list[str]) -> int:
    """Run the test command and the rerun command, print a report, and return the exit code."""
    FAILED.unlink(missing_ok=True)
    code = subprocess.run(first, check=False).returncode
    before = failed()
    after: list[str] = []
    if code != 0 and before:
        code = subprocess.run(second, check=False).returncode
        after = failed() if code != 0 else []
    flaky = [name for name in before if name not in after]
    lines = [f"flaky: {len(flaky)}", *(f"  {name}" for name in flaky)]
    if code != 0:
        lines += [f"failed: {len(after)}", *(f"  {name}" for name in after)]
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text("\n".join(lines) + "\n")
    print(REPORT.read_text(), end="", flush=True)
    return code


if __name__ == "__main__":
    at = sys.argv.index("--")
    sys.exit(main(sys.argv[1:at], sys.argv[at + 1 :]))
