"""service/validate/command.py: hostile commands are bounded, walled in and killed with all they
started; good ones judge."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from coterie.cli.main import main
from coterie.core.errors import ConfigError
from coterie.core.events import ValidationResult
from coterie.core.settings import ValidatorSettings
from coterie.service.validate import sandbox
from coterie.service.validate.base import AnswerContext
from coterie.service.validate.sandbox import CommandLimits, CommandResult, run
from coterie.service.validate.validators import AnswerValidators

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Linux's")
# one that any user can run: as root, commands run as nobody in particular
PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
TIMEOUT_S, MEMORY = 0.4, 100_000_000


def ran(code: str, text: str = "the answer", timeout_s: float = TIMEOUT_S) -> CommandResult:
    return asyncio.run(run([PYTHON, "-c", code], text, CommandLimits(timeout_s, MEMORY)))


def patient(code: str) -> CommandResult:
    """For a command that ends by itself, on a machine that may be slow."""
    return ran(code, timeout_s=30.0)


def left_behind(mark: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if mark in " ".join(process.info["cmdline"] or ()) and process.pid != os.getpid():
            found.append(process.pid)
    return found


def test_a_command_gets_the_text_and_an_empty_world() -> None:
    code = (
        "import os, sys; print(sys.stdin.read(), sorted(os.environ), os.listdir('.'), "
        "sorted(os.listdir('/proc/self/fd')))"
    )
    found = patient(code)
    # Python itself sets LC_CTYPE, and reads the folder through a fourth descriptor
    assert found.output == "the answer ['LC_CTYPE'] [] ['0', '1', '2', '3']"
    assert (found.how, found.detail) == ("exit", 0)
    assert "calls" in found.walls and "files" in found.walls


def test_it_writes_in_its_folder_and_nowhere_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    target = Path(tempfile.gettempdir()) / f"coterie-outside-{os.getpid()}"
    code = f"""
open('inside', 'w').write('x')
for path in ({str(target)!r}, '/dev/shm/coterie-outside', {str(tmp_path / "x")!r}):
    try:
        open(path, 'w').write('x')
        print('wrote', path)
    except OSError as error:
        print('refused')
"""
    found = patient(code)
    assert found.output.split() == ["refused"] * 3
    assert not target.exists() and not list(tmp_path.iterdir())
    assert not list(Path(tempfile.gettempdir()).glob("coterie-check-*/inside"))


def test_it_sees_neither_the_servers_environment_nor_its_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COTERIE_SECRET_FOR_TEST", "hunter2")
    code = """
import os
for name in os.listdir('/proc'):
    if name.isdigit():
        try:
            if b'hunter2' in open(f'/proc/{name}/environ', 'rb').read():
                print('found', name)
        except OSError:
            pass
try:
    os.kill(-1, 9)
except OSError as error:
    pass
print('end')
"""
    assert patient(code).output == "end"


def test_it_cannot_read_what_other_processes_were_started_with() -> None:
    waits = "print(flush=True); input()"
    told = subprocess.Popen(
        [PYTHON, "-c", waits, "words-of-the-server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert told.stdout is not None and told.stdout.readline()
    code = """
import os
for number in range(1, 70000):
    try:
        if b'words-of-' + b'the-server' in open(f'/proc/{number}/cmdline', 'rb').read():
            print('found', number)
    except OSError:
        pass
print('end', len(open('/proc/self/comm').read()) > 0, os.path.exists('/etc'))
"""
    try:
        with Path(f"/proc/{told.pid}/cmdline").open() as file:
            assert "words-of-the-server" in file.read()
        assert patient(code).output.split() == ["end", "True", "True"]
    finally:
        told.communicate(b"\n")


def test_it_opens_no_socket_of_any_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"""
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
    try:
        socket.socket(family)
        print('opened', family)
    except OSError as error:
        print('refused')
try:
    socket.create_connection(('127.0.0.1', {port}), 1)
    print('connected')
except OSError:
    print('refused')
"""
        assert patient(code).output.split() == ["refused"] * 4


FOREVER = {
    "hangs": "import time; time.sleep(77)",
    "ignores signals": """
import signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    time.sleep(1)
""",
    "fork bomb": """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
    "runs away": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(77)
time.sleep(77)
""",
}


@pytest.mark.parametrize("name", FOREVER)
def test_what_would_last_for_ever_is_killed_with_all_it_started(name: str) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    began = time.monotonic()
    found = ran(FOREVER[name] + f"\n# {mark}")
    # on many cores a fork bomb is over its memory before it is over its time
    assert found.how in (("timeout", "memory") if name == "fork bomb" else ("timeout",)), found
    assert found.detail == {"timeout": TIMEOUT_S, "memory": MEMORY}[found.how]
    assert time.monotonic() - began < TIMEOUT_S + sandbox.GRACE_S
    assert not left_behind(mark)


def test_what_a_command_leaves_behind_ends_with_it() -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(77)
"""
    found = patient(f"{code}\n# {mark}")
    assert (found.how, found.detail) == ("exit", 0)
    assert not left_behind(mark)


def test_memory_is_bounded_for_one_and_for_all_together() -> None:
    alone = patient("held = []\nwhile True: held.append(bytearray(10**7))")
    assert alone.how in ("exit", "memory", "signal") and alone.detail != 0
    together = """
import os, time
for _ in range(5):
    os.fork()
held = bytearray(os.urandom(1)) * 3 * 10**7
time.sleep(77)
"""
    found = patient(together)
    assert (found.how, found.detail) == ("memory", MEMORY)


def test_disk_and_output_are_bounded() -> None:
    found = patient("i = 0\nwhile True:\n open(str(i), 'wb').write(b'x' * 10**7); i += 1")
    assert found.how == "disk"
    many = patient("i = 0\nwhile True:\n open(str(i), 'w').close(); i += 1")
    assert many.how == "disk"
    one = patient("import sys\nwith open('x', 'wb') as f:\n while True: f.write(b'x' * 10**6)")
    assert (one.how, one.detail) != ("exit", 0)
    loud = patient("while True: print('x' * 1000)")
    assert loud.how == "output" and len(loud.output) <= sandbox.MAX_OUTPUT_BYTES


def test_a_text_that_is_never_read_holds_up_nobody() -> None:
    found = ran("import time; time.sleep(0.05)", text="x" * 900_000, timeout_s=30.0)
    assert (found.how, found.detail) == ("exit", 0)


UNPRIVILEGED = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[1])
from coterie.service.validate import launch
from coterie.service.validate.sandbox import CommandLimits, run
if sys.argv[2] == "plain":
    # as on a system without namespaces: unshare is refused to this process and its children
    launch.prctl(launch.PR_SET_NO_NEW_PRIVS, 1)
    assert launch.calls()
code = '''
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(77)
    os._exit(0)
for attempt in (lambda: open("/proc/%d/environ" % os.getppid()).read(),
                lambda: os.kill(os.getppid(), 9), lambda: open("/tmp/coterie-x", "w"),
                lambda: open("/proc/%s/cmdline" % OUTSIDE).read()):
    try:
        attempt()
        print("did")
    except OSError:
        print("refused")
'''
code = f"OUTSIDE = {os.getpid()}\\n" + code
limits = CommandLimits(20, 10**8)
found = asyncio.run(run([sys.executable, "-c", code + "# " + sys.argv[3]], "", limits))
print(found.how, found.detail, found.output.split().count("refused"), *found.walls)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("system", ["namespaces", "plain"])
def test_the_walls_stand_without_privileges_and_without_namespaces(system: str) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    root = Path(sandbox.__file__).resolve().parents[3]
    done = subprocess.run(
        [PYTHON, "-c", UNPRIVILEGED, str(root), system, mark],
        user=65534, group=65534, extra_groups=[], env={}, cwd="/",
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if "No module named" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip("another user cannot read this checkout")
    assert done.returncode == 0, done.stderr
    how, detail, refused, *walls = done.stdout.split()
    assert (how, detail) == ("exit", "0") and int(refused) == 4
    assert {"files", "calls"} <= set(walls)
    assert ("processes" in walls) == (system == "namespaces")
    assert not left_behind(mark)


# --- as validators


def judged(
    text: str, context: AnswerContext, *commands: tuple[str, Sequence[str]], **options: float | str
) -> ValidationResult | None:
    listed = [
        ValidatorSettings(
            name, tuple(command), experts=("sql",), task_types=("classification",),
            **{"timeout_s": 30.0, **options},  # type: ignore[arg-type]
        )
        for name, command in commands
    ]  # fmt: skip

    async def main() -> ValidationResult | None:
        validators = AnswerValidators(listed)
        try:
            return await validators.validate(text, context)
        finally:
            await validators.close()

    return asyncio.run(main())


GOOD = ("good", ["/bin/sh", "-c", 'read line; test "$line" = yes'])
BAD = ("bad", ["/bin/sh", "-c", "echo this is wrong; exit 3"])
SILENT = ("silent", ["/bin/sh", "-c", "exit 3"])
SQL, CLASS = AnswerContext(experts=("sql",)), AnswerContext(task_type="classification")


def test_commands_judge_the_experts_and_tasks_they_are_for() -> None:
    found = judged("yes", SQL, GOOD)
    assert found is not None and (found.valid, found.validator) == (True, "good")
    found = judged("yes", CLASS, GOOD, BAD)
    assert found is not None and (found.valid, found.error) == (False, "this is wrong")
    assert found.validator == "bad"
    found = judged("no", CLASS, GOOD)
    assert found is not None and found.error == "the validator's exit status is 1"
    assert judged("yes", AnswerContext(experts=("other",)), BAD) is None
    found = judged("{}", AnswerContext(task_type="json_parsing", experts=("sql",)), SILENT)
    assert found is not None and found.validator == "silent" and not found.valid
    found = judged("{", AnswerContext(task_type="json_parsing", experts=("sql",)), SILENT)
    assert found is not None and found.validator == "json", "what is no JSON needs no command"
    found = judged("yes", AnswerContext(task_type="code_generation", experts=("sql",)), GOOD)
    assert found is not None and found.validator == "good"


def test_a_command_that_is_killed_says_so_and_one_that_cannot_start_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # it hangs on this answer and not on a good one
    code = 'read line; test "$line" = yes || sleep 77'
    slow = ("slow", ["/bin/sh", "-c", code])
    found = judged("x", SQL, slow, timeout_s=2.0, known_good="yes")
    assert found is not None and not found.valid
    assert found.error == "the validator took longer than 2.0 s"
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "broken"
        broken.write_text("#!/nowhere/at/all\n")
        broken.chmod(0o755)
        Path(folder).chmod(0o755)
        assert judged("x", SQL, ("broken", [str(broken)])) is None
    assert "validator_failed" in caplog.messages


def test_a_check_that_is_broken_says_nothing_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It hangs on everything, or on a good answer too: answers do not count against anybody."""
    code = 'read line; test "$line" = yes && exit 0; sleep 77'

    async def main() -> None:
        sleeps = ValidatorSettings("sleeps", ("/bin/sleep", "77"), ("sql",), timeout_s=0.2)
        once = ValidatorSettings("once", ("/bin/sh", "-c", code), ("once",), timeout_s=2.0)
        good = replace(sleeps, name="good", experts=("good",), known_good="yes")
        validators = AnswerValidators([sleeps, once, good])
        health = validators.health
        try:
            began = time.monotonic()
            # the first finds it; it is not asked about the others
            for _ in range(20):
                assert await validators.validate("SELECT 1", SQL) is None
            assert health.broken == {"sleeps": 20}
            assert time.monotonic() - began < 20 * 0.2 + 10
            assert await validators.validate("yes", AnswerContext(experts=("good",))) is None
            assert health.broken["good"] == 1
            # without a known good answer the last one that it accepted shows whether it works
            asked = AnswerContext(experts=("once",))
            assert await validators.validate("no", asked) is None
            health._again_at.clear()
            found = await validators.validate("yes", asked)
            assert found is not None and found.valid
            found = await validators.validate("no", asked)
            assert found is not None and not found.valid and "took longer" in str(found.error)
            assert health.broken["once"] == 1
        finally:
            await validators.close()

    asyncio.run(main())
    assert caplog.messages.count("validator_broken") == 3


def test_an_answer_does_not_escape_by_hanging_a_check_that_works() -> None:
    """Not the first one of a command without a known good answer either; and an answer that was
    nearly too slow is not what shows whether the command works."""
    code = 'read line; case "$line" in hang) sleep 77;; late) sleep 3;; no) exit 1;; esac'

    async def main() -> None:
        settings = ValidatorSettings("mine", ("/bin/sh", "-c", code), ("sql",), timeout_s=4.0)
        validators = AnswerValidators([settings])
        try:
            for text in ("hang", "late", "yes", "late"):
                found = await validators.validate(text, SQL)
                assert found is not None and found.valid == (text != "hang"), found
            assert validators.health.last_accepted("mine") == "yes"
            assert not validators.health.broken
        finally:
            await validators.close()

    asyncio.run(main())


def test_doctor_names_broken_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path / "home"))
    listed = {
        "hangs": '["/bin/sleep", "77"]\ntimeout_s = 0.2',
        "refuses": '["/bin/sh", "-c", "cat; exit 3"]\nknown_good = "yes"',
        # an empty answer may be refused
        "works": '["/bin/sh", "-c", "read line"]',
        "accepts": f'["/bin/sh", "-c", \'{GOOD[1][2]}\']\nknown_good = "yes"',
    }
    text = "".join(
        f'[[validators]]\nname = "{name}"\nexperts = ["sql"]\ncommand = {command}\n'
        for name, command in listed.items()
    )
    (tmp_path / "c.toml").write_text(text)
    main(["doctor", "--json", "--config", str(tmp_path / "c.toml")])
    report = json.loads(capsys.readouterr().out)
    found = [item["what"] for item in report["missing"] if "validators." in item["what"]]
    assert found == [
        "validators.hangs: broken: on an empty answer: the validator took longer than 0.2 s",
        "validators.refuses: broken: on its known_good: yes",
    ]


def test_a_command_that_does_not_exist_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="no program '/nowhere/check'"):
        AnswerValidators([ValidatorSettings("gone", ("/nowhere/check",), experts=("sql",))])
