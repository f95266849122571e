"""`make foreign-suites`: one suite after the other, each failure held against known differences.

    python -m tests.foreign [vllm|sglang|llama.cpp ...] [--checkouts DIR] [-k EXPRESSION] [-v]

DIR holds checkouts named vllm, sglang and llama.cpp (cloned there when git can reach them). Ends
with 1 when a test fails that differences.toml does not explain.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.foreign.llama_server import end

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# what their tests import and ours do not
PACKAGES = ("pytest-asyncio==1.4.0", "regex", "requests", "wget==3.2", "tenacity")


Outcomes = dict[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    url: str
    # folder that their tests are laid out in, and the files in it that speak HTTP to a text model
    folder: str
    files: tuple[str, ...]
    # modules of theirs that tests are built from
    kits: tuple[str, ...] = ()
    # in the text of their files, before they run
    replaced: tuple[tuple[str, str], ...] = ()
    # pytest's -m
    marks: str = ""


_OPENAI = "tests/entrypoints/openai"
_SGLANG = "test/registered/openai_server"
SUITES = (
    Suite(
        "vllm",
        "https://github.com/vllm-project/vllm",
        ".",
        (
            "tests/entrypoints/anthropic/test_messages.py",
            f"{_OPENAI}/chat_completion/test_chat.py",
            f"{_OPENAI}/chat_completion/test_chat_completion.py",
            f"{_OPENAI}/chat_completion/test_chat_echo.py",
            f"{_OPENAI}/chat_completion/test_chat_logit_bias_validation.py",
            f"{_OPENAI}/chat_completion/test_completion_with_function_calling.py",
            f"{_OPENAI}/chat_completion/test_enable_force_include_usage.py",
            f"{_OPENAI}/completion/test_completion.py",
            f"{_OPENAI}/models/test_models.py",
            f"{_OPENAI}/responses/test_basic.py",
            f"{_OPENAI}/responses/test_function_call.py",
            f"{_OPENAI}/responses/test_harmony.py",
            f"{_OPENAI}/responses/test_namespace_tool_separator.py",
            f"{_OPENAI}/responses/test_parsable_context.py",
            f"{_OPENAI}/responses/test_simple.py",
            f"{_OPENAI}/responses/test_stateful.py",
            f"{_OPENAI}/responses/test_structured_output.py",
            f"{_OPENAI}/test_async_tokenization.py",
            f"{_OPENAI}/test_chunked_prompt.py",
            f"{_OPENAI}/test_return_token_ids.py",
            f"{_OPENAI}/test_return_tokens_as_ids.py",
            "tests/entrypoints/serve/instrumentator/test_basic.py",
            "tests/entrypoints/serve/instrumentator/test_metrics.py",
            "tests/entrypoints/serve/lora/test_lora_adapters.py",
            "tests/entrypoints/serve/tokenize/test_tokenization.py",
        ),
        ("tests/entrypoints/conftest.py", f"{_OPENAI}/responses/conftest.py"),
        # the files are no package here
        (
            ("from ...utils import", "from tests.utils import"),
            ("from .conftest import", "from tests.entrypoints.openai.responses.conftest import"),
            # context: a small model's answer without a limit often runs to its end
            ('"18192"', '"2048"'),
            # a package of theirs that only their tests of its own models need
            ('find_spec("gpt_oss")', 'find_spec("openai")'),
        ),
    ),
    Suite(
        "sglang",
        "https://github.com/sgl-project/sglang",
        ".",
        (
            f"{_SGLANG}/basic/test_openai_server.py",
            f"{_SGLANG}/function_call/test_openai_function_calling.py",
            f"{_SGLANG}/function_call/test_anthropic_tool_use.py",
            f"{_SGLANG}/validation/test_matched_stop.py",
            f"{_SGLANG}/validation/test_request_length_validation.py",
            "test/manual/openai_server/features/test_continuous_usage_stats.py",
            "test/manual/openai_server/features/test_cache_report.py",
        ),
        (
            "python/sglang/test/kits/anthropic_messages_kit.py",
            "python/sglang/test/kits/matched_stop_kit.py",
        ),
    ),
    Suite(
        "llama.cpp",
        "https://github.com/ggml-org/llama.cpp",
        "tools/server/tests",
        tuple(
            f"tools/server/tests/unit/test_{name}.py"
            for name in (
                *("basic", "chat_completion", "compat_anthropic", "completion", "ignore_eos"),
                *("security", "template", "tokenize", "tool_call"),
            )
        ),
        ("tools/server/tests/utils.py", "tools/server/tests/conftest.py"),
        # no models to fetch first; OpenAI's paths are without /v1 there and name no model
        (
            ("ServerPreset.load_all()", "pass"),
            ('"/chat/completions"', '"/v1/chat/completions"'),
            ('"/completions"', '"/v1/completions"'),
            ('"/models"', '"/v1/models"'),
            ("json=data", 'json={**data, "model": self.model_alias} if "/v1/" in path else data'),
            ('model="gpt-3.5-turbo-instruct"', "model=server.model_alias"),
            ('model="davinci-002"', "model=server.model_alias"),
            ("server.server_port = 808", 'server.server_port = int(os.environ["PORT"]) #'),
        ),
        # those need one of thirty models each; llama.cpp leaves them out too unless asked
        "not slow",
    ),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [suite.name for suite in SUITES]
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(names)}")
    parser.add_argument("--checkouts", type=Path, default=ROOT / ".cache" / "foreign")
    parser.add_argument("-k", dest="expression", default="", help="as pytest's")
    parser.add_argument("-v", dest="verbose", action="store_true", help="show what is explained")
    args = parser.parse_args()
    packages = _packages()
    wrong = 0
    for suite in SUITES:
        if not args.suites or suite.name in args.suites:
            checkout = _checkout(suite, args.checkouts)
            found = _run(suite, checkout, packages, args.expression)
            wrong += _judge(suite, found, whole=not args.expression, verbose=args.verbose)
    return 1 if wrong else 0


def _packages() -> Path:
    """Beside the virtual environment, which stays as it is."""
    folder = ROOT / ".cache" / "foreign" / "packages"
    if not folder.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *PACKAGES], check=True)
    return folder


def _checkout(suite: Suite, parent: Path) -> Path:
    folder = parent / suite.name
    if not folder.exists():
        command = ["git", "clone", "-q", "--depth", "1", suite.url, str(folder)]
        if subprocess.run(command).returncode != 0:
            sys.exit(
                f"{suite.url} could not be cloned; give --checkouts a folder with {suite.name}"
            )
    return folder


def _run(suite: Suite, checkout: Path, packages: Path, expression: str) -> Outcomes:
    """By test: its outcome, and why it is not another."""
    with tempfile.TemporaryDirectory(prefix="foreign-", ignore_cleanup_errors=True) as made:
        folder, report, lent = Path(made), Path(made) / "report.json", Path(made) / "lent.json"
        for name in (*suite.files, *suite.kits):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _copy(checkout, name, folder / name, suite.replaced)
        _tell_apart([folder / name for name in suite.files])
        places = [HERE / "stand_ins" / suite.name, packages, folder / suite.folder, ROOT]
        # where SGLang's own package is, of which the kits are a part
        places.append(folder / "python")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "FOREIGN_REPORT": str(report),
            # logs and homes of servers go when the suite has ended
            "TMPDIR": made,
            "LLAMA_SERVER_BIN_PATH": str(_llama_server(folder)),
            "FOREIGN_LENT": str(lent),
            "PORT": str(_free_port()),
        }
        command = [
            *(sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors"),
            *("-p", "tests.foreign.plugin", "-p", "no:cacheprovider", "--asyncio-mode=auto"),
            *("-c", os.devnull, "--rootdir", str(folder), "--timeout=600", "--tb=native"),
            *(("-k", expression) if expression else ()),
            *(("-m", suite.marks) if suite.marks else ()),
            *(str(folder / name) for name in suite.files),
        ]
        try:
            subprocess.run(command, cwd=folder / suite.folder, env=environment)
        finally:
            end(lent)
        if not report.is_file():
            return {suite.name: ("failed", "did not run")}
        found: Outcomes = json.loads(report.read_text())
        return found


def _llama_server(folder: Path) -> Path:
    program = folder / "llama-server"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "llama_server.py"}" "$@"\n')
    program.chmod(0o755)
    return program


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _copy(checkout: Path, name: str, target: Path, replaced: tuple[tuple[str, str], ...]) -> None:
    """From a work tree, or from a repository that has none."""
    if (checkout / name).is_file():
        text = (checkout / name).read_text(encoding="utf-8")
    else:
        command = ["git", "-C", str(checkout), "show", f"HEAD:{name}"]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    for theirs, here in replaced:
        text = text.replace(theirs, here)
    target.write_text(text)


def _tell_apart(files: list[Path]) -> None:
    """Files of one name become modules of packages; pytest takes one of each name otherwise."""
    names = Counter(path.name for path in files)
    for path in files:
        if names[path.name] > 1:
            (path.parent / "__init__.py").touch()


def _judge(suite: Suite, found: Outcomes, *, whole: bool, verbose: bool) -> int:
    known = tomllib.loads((HERE / "differences.toml").read_text())[suite.name]
    counts = {"passed": 0, "skipped": 0, "explained": 0, "unexplained": 0}
    matched: set[int] = set()
    for test, (outcome, why) in sorted(found.items()):
        if outcome in ("passed", "skipped"):
            counts[outcome] += 1
            continue
        reasons = [at for at, row in enumerate(known) if re.search(row["test"], test)]
        matched.update(reasons)
        counts["explained" if reasons else "unexplained"] += 1
        if not reasons:
            print(f"UNEXPLAINED {suite.name} {test}: {why}")
        elif verbose:
            print(f"EXPLAINED {suite.name} {test}: {why}")
    # no fault: what a model of this size says decides a few of them
    for at, row in enumerate(known):
        if whole and at not in matched:
            print(f"UNUSED {suite.name} {row['test']}: nothing that it explains failed")
    print(f"{suite.name}: {', '.join(f'{count} {name}' for name, count in counts.items())}")
    return counts["unexplained"]


if __name__ == "__main__":
    sys.exit(main())
