"""`coterie chat`: a conversation in the terminal or through a pipe, one line per turn."""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from coterie.cli.options import add_experts, add_model, add_moe, add_sampling
from coterie.cli.run import open_llm, options
from coterie.cli.specialist import add_specialist, use_specialist
from coterie.cli.terminal import note
from coterie.core.errors import ContextLengthExceeded

if TYPE_CHECKING:
    from coterie.workers.embedded import LLM

HELP = "talk to a model in this terminal"
EPILOG = """\
examples:
  coterie chat
  coterie chat --system "Answer in one sentence." --temperature 0.2
  coterie chat --expert ./my-lora=0.5
  coterie chat --config examples/eight.toml --specialist text-to-sql
  printf 'Hello\\nAnd again\\n' | coterie chat

in the conversation: /reset forgets it, /exit leaves (so does Ctrl-D),
Ctrl-C stops an answer.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_specialist(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling(parser, max_tokens=512)
    add_experts(parser)
    add_moe(parser)


def execute(args: argparse.Namespace) -> int:
    args = use_specialist(args)
    with open_llm(args) as llm:
        return ChatLoop(llm, args.system, options(args)).run()


class ChatLoop:
    def __init__(self, llm: LLM, system: str | None, options: dict[str, Any]) -> None:
        self.llm = llm
        self.options = options
        self.system = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict[str, str]] = []
        self.is_terminal = sys.stdin.isatty()

    def run(self) -> int:
        if self.is_terminal:
            # line editing; some systems do not have it
            with suppress(ImportError):
                importlib.import_module("readline")
            note("type a message; /reset forgets, /exit leaves")
        while (line := self._read()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                self.turns.clear()
                note("forgotten")
            elif line.startswith("/"):
                note("commands: /reset, /exit")
            elif line:
                self._answer(line)
        return 0

    def _read(self) -> str | None:
        try:
            return input("> " if self.is_terminal else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            note("")
            return None

    def _answer(self, line: str) -> None:
        self.turns.append({"role": "user", "content": line})
        pieces: list[str] = []
        try:
            for delta in self.llm.stream([*self.system, *self.turns], **self.options):
                pieces.append(delta.text)
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            note(" (stopped)")
        except ContextLengthExceeded as error:
            self.turns.pop()
            note(f"{error.message} Type /reset to begin anew.")
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.turns.append({"role": "assistant", "content": "".join(pieces)})
