"""What the scripted model says to each coding agent: it corrects a program in a scratch repository
by the agent's own tools, runs it, and tells how it went."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.helpers.models.scripted import ScriptedAnswer

FILE = "greeting.py"
TASK = "greeting.py greets with a misspelt word. Correct it, add a table of squares, and run it."
DONE = "The program now greets with a correct word; its table holds the squares up to 150."
UNTOOLED = "A small correction"
WRONG = 'def greeting(name):\n    return "Helo, " + name\n'
# long, so that there is time to stop somebody in the middle of the edit
SQUARES = "".join(f"    {number}: {number * number},\n" for number in range(1, 151))
RIGHT = f'SQUARES = {{\n{SQUARES}}}\n\n\ndef greeting(name):\n    return "Hello, " + name\n'
CALL = '\n\nprint(greeting("reader"))\n'
BEFORE, AFTER = WRONG + CALL, RIGHT + CALL
PRINTED = "Hello, reader"


def scratch_repository(folder: Path) -> Path:
    """A repository with the program as it was at first; what was there is put back."""
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / FILE).write_text(BEFORE)
        who = ["-c", "user.name=tester", "-c", "user.email=tester@localhost"]
        for words in (["init", "-q"], ["add", FILE], [*who, "commit", "-qm", "a greeting"]):
            subprocess.run(["git", *words], cwd=folder, check=True)
    (folder / FILE).write_text(BEFORE)
    return folder


def claude_code_script(repository: Path) -> list[ScriptedAnswer]:
    file = str(repository / FILE)
    edit = {"file_path": file, "old_string": WRONG, "new_string": RIGHT}
    run = {"command": f"python3 {FILE}", "description": "Run the greeting"}
    return [
        ScriptedAnswer("I read the program first.", "Read", {"file_path": file}),
        ScriptedAnswer("There is the misspelt word.", "Edit", edit),
        ScriptedAnswer("Now I run it.", "Bash", run),
        ScriptedAnswer(DONE),
    ]


REMOVED = "".join(f"-{line}\n" for line in WRONG.splitlines())
ADDED = "".join(f"+{line}\n" for line in RIGHT.splitlines())
PATCH = f"*** Begin Patch\n*** Update File: {FILE}\n@@\n{REMOVED}{ADDED}*** End Patch"
SHELL = "exec_command"


def codex_script(_: Path) -> list[ScriptedAnswer]:
    """The patch is a command of the shell."""
    command = {"cmd": f"apply_patch <<'EOF'\n{PATCH}\nEOF"}
    return _by_shell(ScriptedAnswer("There is the misspelt word.", SHELL, command))


def codex_patch_script(_: Path) -> list[ScriptedAnswer]:
    """The patch is the input of a tool that takes text, held to a grammar."""
    fixed = ("*** Begin Patch\n*** Update File: ", "*** End Patch")
    spoken = "There is the misspelt word."
    return _by_shell(ScriptedAnswer(spoken, "apply_patch", {"input": PATCH}, fixed))


def _by_shell(edit: ScriptedAnswer) -> list[ScriptedAnswer]:
    return [
        ScriptedAnswer("I read the program first.", SHELL, {"cmd": f"cat {FILE}"}),
        edit,
        ScriptedAnswer("Now I run it.", SHELL, {"cmd": f"python3 {FILE}"}),
        ScriptedAnswer(DONE),
    ]
