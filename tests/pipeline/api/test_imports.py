from __future__ import annotations

import subprocess
import sys

from saccade.pipeline.asset_files import DEMO_CLIP
from tests.support import REPO

CODE = """
import sys
from saccade.__main__ import main
sys.argv = ["saccade", "run", CLIP, "--end", "1", "--detect", "person", "-q"]
try:
    status = main()
except SystemExit as ended:
    status = ended.code
print(status, sorted({"fastapi", "starlette", "uvicorn", "httpx", "aiortc"} & sys.modules.keys()))
"""


def test_a_run_without_http_loads_no_server() -> None:
    code = CODE.replace("CLIP", repr(str(DEMO_CLIP)))
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] in ("0 []", "None []"), done.stderr
