"""`coterie doctor`: what this machine has, what will be used, what is missing and how to fix it."""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
from pathlib import Path

from coterie.api.auth import exposed_key_files, is_open_to_all
from coterie.cli import machine
from coterie.cli.config import faults_of
from coterie.cli.terminal import facts, nbytes, table
from coterie.core.config import load
from coterie.weights.home import state_dir

HELP = "show what this machine has, what will be used and what is missing"
EPILOG = """\
examples:
  coterie doctor
  coterie doctor --json     for scripts; exit code 1 when something is missing
"""

# module -> (package to install, its purpose, whether the engine cannot run without it)
PACKAGES = {
    "torch": ("torch", "running models", True),
    "numpy": ("numpy", "running models", True),
    "safetensors": ("safetensors", "reading weights", True),
    "tokenizers": ("tokenizers", "reading text", True),
    "jinja2": ("jinja2", "chat templates", True),
    "fastapi": ("fastapi", "serving", False),
    "uvicorn": ("uvicorn", "serving", False),
    "msgspec": ("msgspec", "serving", False),
    "zmq": ("pyzmq", "serving", False),
    "huggingface_hub": ("huggingface_hub", "hf: models", False),
    "rich": ("rich", "progress bars", False),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML settings: their specialists and key files"
    )


def execute(args: argparse.Namespace) -> int:
    report = examine()
    report["missing"] += _exposed_keys(args.config)
    if args.config is not None:
        report["specialists"] = machine.specialist_facts(args.config)
        faults = faults_of(args.config)
        report["missing"] += [
            {"what": fault, "mend": f"change {args.config}", "needed": True} for fault in faults
        ]
        if not faults:
            report["missing"] += _broken_checks(args.config)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(render(report))
    return 1 if any(fault["needed"] for fault in report["missing"]) else 0


def examine() -> machine.Facts:
    """Everything as plain values; writes and fetches nothing."""
    packages = {name: machine.package_version(name, item[0]) for name, item in PACKAGES.items()}
    report: machine.Facts = {
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": machine.cpu(),
        "memory": machine.memory(),
        "compiler": machine.compiler(),
        "torch": machine.torch_facts(),
        "packages": packages,
        "home": machine.home_facts(),
        "models": machine.cached_models(),
    }
    report["used"] = machine.used(report["torch"], report["models"])
    report["gpu_sizes"] = machine.gpu_sizes(report["torch"], report["models"])
    report["missing"] = _missing(report)
    return report


def _missing(report: machine.Facts) -> list[machine.Facts]:
    missing = [
        {
            "what": f"{package} ({purpose})",
            "mend": f"{sys.executable} -m pip install {package}",
            "needed": needed,
        }
        for module, (package, purpose, needed) in PACKAGES.items()
        if report["packages"][module] is None
    ]
    if report["compiler"] is None:
        missing.append(
            {
                "what": "a C++ compiler (fast CPU kernels; without one torch runs, slower)",
                "mend": "apt-get install g++   (or your system's equivalent)",
                "needed": False,
            }
        )
    if not report["home"]["writable"]:
        missing.append(
            {
                "what": f"a home folder that can be written ({report['home']['path']})",
                "mend": "export COTERIE_HOME=/a/folder/of/yours",
                "needed": True,
            }
        )
    if not report["models"]:
        missing.append({"what": "a model on this machine", "mend": "coterie pull", "needed": False})
    return missing


def _broken_checks(config: Path) -> list[machine.Facts]:
    """Commands of `[[validators]]` that refuse their `known_good`, or hang on an empty answer."""
    from coterie.service.validate.command import ValidatorCommand

    found = []
    for item in load(config).validators:
        fault = asyncio.run(ValidatorCommand(item).fault_on_good_answer())
        if fault is not None:
            answer = "its known_good" if item.known_good else "an empty answer"
            what = f"validators.{item.name}: broken: on {answer}: {fault}"
            found.append({"what": what, "mend": f"change {config}", "needed": True})
    return found


def _exposed_keys(config: Path | None) -> list[machine.Facts]:
    """Key files that every user of this machine can read: our own, and those that `config`
    names."""
    files = [file for file in (state_dir() / "keys").glob("*") if file.suffix != ".pub"]
    exposed = [file for file in files if is_open_to_all(file)]
    if config is not None:
        exposed += exposed_key_files(load(config).server)
    return [
        {
            "what": f"a key file that only its owner can read ({file})",
            "mend": f"chmod 600 {file}",
            "needed": False,
        }
        for file in exposed
    ]


def render(report: machine.Facts) -> str:
    cpu, memory, torch = report["cpu"], report["memory"], report["torch"]
    pairs = [
        ("system", f"{report['system']}, Python {report['python']}"),
        ("cpu", f"{cpu['name']}, {cpu['cores']} cores"),
        ("cpu flags", " ".join(cpu["flags"]) or "none that matter here"),
        ("kernels", cpu["kernels"]),
        ("memory", f"{nbytes(memory['total_bytes'])}, {nbytes(memory['free_bytes'])} free"),
        ("compiler", report["compiler"] or "none"),
        ("torch", torch["version"] or "not installed"),
        ("cuda", torch["cuda"] or "none"),
        ("triton", torch["triton"] or "none"),
        ("gpu sizes", sizes_line(report["gpu_sizes"])),
        ("home", report["home"]["path"]),
    ]
    parts = [facts(pairs), _used(report["used"]), _models(report["models"])]
    if report.get("specialists"):
        parts.append(_specialists(report["specialists"]))
    if not report["missing"]:
        parts.append("nothing is missing")
    for fault in report["missing"]:
        word = "missing" if fault["needed"] else "optional"
        parts.append(facts([(word, fault["what"]), ("  mend", fault["mend"])]))
    return "\n\n".join(parts)


def sizes_line(sizes: machine.Facts | None) -> str:
    """Whether the programs of this GPU have measured sizes."""
    if sizes is None:
        return "not needed"
    lacking = {model: shapes for model, shapes in sizes["missing"].items() if shapes}
    if not sizes["entries"]:
        return f"no table for {sizes['device']}: safe defaults run; measure them: coterie tune"
    line = f"{sizes['entries']} shapes measured for {sizes['device']}"
    for model, shapes in lacking.items():
        line += f"; {len(shapes)} of {model} are not ({', '.join(shapes)}) and run with safe "
        line += f"defaults: coterie tune {model}"
    return line


def _used(used: machine.Facts) -> str:
    dtype = used["dtype"] or "dtype as its file keeps it"
    pairs = [
        ("will use", f"{used['device']}, {used['threads']} threads"),
        ("KV", f"at most {nbytes(used['max_kv_bytes'])}"),
        ("model", f"{used['model']}, {dtype}"),
    ]
    return facts(pairs)


def _specialists(listed: list[machine.Facts]) -> str:
    states = {True: "here", False: "coterie pull", None: "remote"}
    rows = [
        (item["name"], item["model"], states[item["here"]], ", ".join(item["experts"]) or "-")
        for item in listed
    ]
    heads = ("specialist", "model", "state", "experts")
    return table(heads, rows, words=heads)


def _models(models: list[machine.Facts]) -> str:
    if not models:
        return "models: none yet"
    rows = [(model["source"], nbytes(model["nbytes"])) for model in models]
    return table(("model", "size"), rows)
