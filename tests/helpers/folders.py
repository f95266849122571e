"""Where tests put files: what is temporary has one folder per run, which the run removes; what is
kept between runs is below `.cache`.

A run is one pytest process and all that it starts: xdist's workers, servers, commands. Their
TMPDIR is that folder, so that a leak of any of them is found there (`leaks`).
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

from coterie.core.own_folder import make_own_folder, remove_left_folders

ROOT = Path(__file__).resolve().parents[2]
# tiny checkpoints and adapters, by the digest of all that shapes them
CHECKPOINTS = ROOT / ".cache" / "checkpoints"
# in the environment of a run's processes: its folder
RUN = "COTERIE_TEST_FOLDER"
# below it: what tests made themselves
OWN = "own"
# what is ours has this prefix; compilers, browsers and Node leave their own caches
LEAK = re.compile(r"\.?coterie")


def begin_run() -> bool:
    """Sets the temporary folder of this process and of those that it starts. False if they have the
    folder of a run that another process began."""
    is_first = RUN not in os.environ
    if is_first:
        # short: sockets lie below it; the folders of runs that were killed are removed
        folder = make_own_folder(Path(tempfile.gettempdir()), "ct-")
        # a sandbox runs as another user, and its folder is inside
        folder.chmod(0o711)
        (folder / OWN).mkdir()
        os.environ[RUN] = os.environ["TMPDIR"] = str(folder)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tempfile.tempdir = os.environ[RUN]
    return is_first


def leaks() -> list[str]:
    """What lies in the temporary folder of the run and was to be removed by who made it. A server
    that a test killed could not: what it left is removed as the next server would."""
    folder = Path(os.environ[RUN])
    for prefix in ("coterie-run-", "coterie-check-"):
        remove_left_folders(folder, prefix)
    return sorted(path.name for path in folder.iterdir() if LEAK.match(path.name))


def temporary_folder(prefix: str = "coterie-") -> Path:
    """A new folder, removed at the end of the run."""
    if RUN in os.environ:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=Path(os.environ[RUN]) / OWN))
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
