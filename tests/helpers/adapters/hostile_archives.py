"""Archives that must be refused, each for one reason, built block by block around a good one."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
import zipfile
from collections.abc import Iterable
from typing import Any

from tests.helpers.adapters.package_files import document, safetensors

Entry = tuple[bytes, bytes]

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
WEIGHTS = safetensors({"a": ([4, 4], bytes(64)), "b": ([2], bytes(8))})


def block(
    name: bytes, size: int, kind: bytes = b"0", link: bytes = b"", size_field: bytes = b""
) -> bytes:
    """A header block with a right checksum, whatever else is wrong."""
    fields = (
        name.ljust(100, b"\0")[:100], b"0000644\0", b"0000000\0", b"0000000\0",
        size_field or b"%011o\0" % size, b"00000000000\0", b" " * 8, kind, link.ljust(100, b"\0"),
        b"ustar\0", b"00", bytes(64), b"0000000\0", b"0000000\0", bytes(155), bytes(12),
    )  # fmt: skip
    made = bytearray(b"".join(fields))
    made[148:156] = b"%06o\0 " % sum(made)
    return bytes(made)


def entry(name: bytes, data: bytes, **fields: Any) -> bytes:
    return block(name, len(data), **fields) + data + bytes(-len(data) % 512)


def good_entries(**more: Any) -> list[Entry]:
    return [
        (b"adapter_config.json", json.dumps(CONFIG).encode()),
        (b"adapter_model.safetensors", WEIGHTS),
        (b"manifest.json", json.dumps(document(**more)).encode()),
    ]


def tarred(entries: Iterable[Entry], end: bytes = bytes(1024)) -> bytes:
    return b"".join(entry(name, data) for name, data in entries) + end


def zipped(tar: bytes) -> bytes:
    return gzip.compress(tar, 6, mtime=0)


def good() -> bytes:
    return zipped(tarred(good_entries()))


def plus(name: bytes, data: bytes = b"text", **fields: Any) -> bytes:
    """The good package with one more entry."""
    return zipped(tarred(good_entries(), end=b"") + entry(name, data, **fields) + bytes(1024))


def instead(name: bytes, data: bytes) -> bytes:
    return zipped(tarred([(n, data if n == name else d) for n, d in good_entries()]))


def _tensors(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return instead(b"adapter_model.safetensors", len(text).to_bytes(8, "little") + text + data)


def _tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("archive/data.pkl", "x")
    return made.getvalue()


def _pax() -> bytes:
    """What Python's tarfile writes for a name that does not fit: an extension header."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("manifest.json")
        info.pax_headers = {"path": "../../escaped"}
        tar.addfile(info)
    return zipped(made.getvalue())


def _manifest(**more: Any) -> bytes:
    return instead(b"manifest.json", json.dumps(document(**more)).encode())


def _manifest_text(text: str) -> bytes:
    return instead(b"manifest.json", text.encode())


def names() -> dict[str, tuple[bytes, str]]:
    """Entries that name another place, or the same place twice, or what no package holds."""
    return {
        "parent": (plus(b"../evil"), "outside"),
        "parent inside": (plus(b"tests/../../evil.json"), "outside"),
        "absolute": (plus(b"/etc/passwd"), "outside"),
        "drive": (plus(b"C:evil.json"), "outside"),
        "backslash": (plus(b"tests\\..\\evil.json"), "outside"),
        "dot": (plus(b"./README.md"), "clean"),
        "empty part": (plus(b"tests//a.json"), "clean"),
        "control": (plus(b"tests/a\n.json"), "clean"),
        "space": (plus(b"tests/a .json"), "clean"),
        "trailing dot": (plus(b"tests/a./b.json"), "clean"),
        "device name": (plus(b"tests/nul.json"), "device"),
        "not ascii": (plus("tests/é.json".encode()), "ASCII"),
        "decomposed": (plus("tests/e\u0301.json".encode()), "ASCII"),
        "empty name": (plus(b""), "clean"),
        "deep": (plus(b"tests/a/b/c.json"), "deeply"),
        "duplicate": (plus(b"manifest.json", good_entries()[2][1]), "one name"),
        "case": (
            zipped(tarred([*good_entries(), (b"tests/A.json", b"{}"), (b"tests/a.json", b"{}")])),
            "one name",
        ),
        "file and folder": (
            zipped(tarred([*good_entries(), (b"tests/a.md", b""), (b"tests/a.md/b.md", b"")])),
            "inside another",
        ),
        "unknown": (plus(b"setup.py"), "no file of"),
        "hidden": (plus(b".bashrc"), "clean"),
        "pickle pt": (plus(b"soft_prompts/a.pt"), "pickle"),
        "pickle bin": (plus(b"adapter_model.bin"), "pickle"),
        "pickle args": (plus(b"training_args.bin"), "pickle"),
        "pickle pkl": (plus(b"tests/a.PKL"), "pickle"),
        "many": (
            zipped(tarred([*good_entries(), *((b"tests/%d.md" % i, b"") for i in range(300))])),
            "more than 256",
        ),
    }


def kinds() -> dict[str, tuple[bytes, str]]:
    """Entries that are no regular files, and damaged archives."""
    whole = good()
    plain = tarred(good_entries())
    return {
        "symbolic link": (plus(b"README.md", b"", kind=b"2", link=b"/etc/passwd"), "symbolic"),
        "hard link": (plus(b"README.md", b"", kind=b"1", link=b"manifest.json"), "hard link"),
        "device": (plus(b"README.md", b"", kind=b"3"), "a device"),
        "pipe": (plus(b"README.md", b"", kind=b"6"), "a pipe"),
        "directory": (plus(b"tests", b"", kind=b"5"), "a directory"),
        "sparse": (plus(b"README.md", b"", kind=b"S"), "sparse"),
        "long name": (plus(b"././@LongLink", b"../evil\0", kind=b"L"), "extension"),
        "pax": (_pax(), "extension"),
        "global pax": (plus(b"README.md", b"", kind=b"g"), "extension"),
        "contiguous": (plus(b"README.md", b"", kind=b"7"), "unknown type"),
        "link field": (plus(b"README.md", b"", link=b"/etc/passwd"), "makes no sense"),
        "negative size": (plus(b"README.md", b"", size_field=b"-0000000001\0"), "makes no sense"),
        "binary size": (plus(b"README.md", b"", size_field=b"\x80" + bytes(11)), "makes no sense"),
        "huge size": (plus(b"README.md", b"", size_field=b"77777777777\0"), "are allowed"),
        "checksum": (zipped(b"x" + plain[1:]), "not a tar"),
        "cut": (whole[: len(whole) // 2], "too early"),
        "cut checksum": (whole[:-4], "too early"),
        "no end": (zipped(tarred(good_entries(), end=b"")), "too early"),
        "half an end": (zipped(tarred(good_entries(), end=bytes(512))), "too early"),
        "behind the tar": (zipped(plain + b"x" * 512), "follow"),
        "behind the gzip": (whole + b"x", "follow"),
        "second member": (whole + whole, "follow"),
        "padding": (zipped(plain[:600] + b"x" + plain[601:]), "hidden"),
        "long filling": (zipped(plain + bytes(1 << 20)), "follow"),
        "zip": (_zip(), "not a gzip"),
        "plain tar": (plain, "not a gzip"),
        "empty": (b"", "empty"),
        "gzip of nothing": (zipped(b""), "too early"),
        "wrong crc": (whole[:-8] + bytes(4) + whole[-4:], "damaged"),
        "bomb": (_bomb(), "far more"),
    }


def _bomb() -> bytes:
    """Gigabytes of zeros, as weights, in about a hundred kilobytes."""
    head = tarred(good_entries()[:1], end=b"") + block(b"adapter_model.safetensors", 3 << 30)
    return gzip.compress(head + bytes(66 << 20), 1, mtime=0)


def contents() -> dict[str, tuple[bytes, str]]:
    """Files that are not what their names say."""
    tensors = {"a": _tensor("F32", [4], 0, 16)}
    return {
        "no weights": (zipped(tarred(good_entries()[::2])), "lacks adapter_model"),
        "no manifest": (zipped(tarred(good_entries()[:2])), "lacks manifest"),
        "no config": (zipped(tarred(good_entries()[1:])), "lacks adapter_config"),
        "pickled weights": (instead(b"adapter_model.safetensors", pickle.dumps([1])), "refused"),
        "zipped weights": (instead(b"adapter_model.safetensors", _zip()), "refused"),
        "pickled text": (plus(b"README.md", pickle.dumps({"a": 1}, protocol=4)), "a pickle"),
        "old pickle": (plus(b"README.md", pickle.dumps({"a": 1}, protocol=0)), "a pickle"),
        "endless pickle": (plus(b"tests/a.txt", b"(" * 2_000_000), "a pickle"),
        "calling pickle": (plus(b"tests/a.txt", b"cos\nsystem\n(S'true'\ntR."), "a pickle"),
        "zip as text": (plus(b"README.md", _zip()), "a zip file"),
        "binary text": (plus(b"README.md", b"a\0b"), "not text"),
        "other letters": (plus(b"README.md", b"\xff\xfe"), "not UTF-8"),
        "huge header": (_tensors(b"{}" + b" " * (9 << 20)), "not safetensors"),
        "header past the end": (
            instead(b"adapter_model.safetensors", b"\xff" * 8 + b"{}"),
            "not safetensors",
        ),
        "short": (instead(b"adapter_model.safetensors", b"{}"), "too few"),
        "no tensors": (_tensors({}), "0 tensors"),
        "no json": (_tensors(b"nonsense"), "not valid JSON"),
        "deep header": (_tensors(b"[" * 100_000), "not valid JSON"),
        "tensor twice": (
            _tensors(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":1}'),
            "not valid JSON",
        ),
        "overlap": (
            _tensors(tensors | {"b": _tensor("F32", [2], 8, 16)}, bytes(16)),
            "overlaps",
        ),
        "gap": (_tensors({"a": _tensor("F32", [2], 8, 16)}, bytes(16)), "overlaps or leaves"),
        "outside": (_tensors(tensors, bytes(8)), "end at byte"),
        "hidden bytes": (_tensors(tensors, bytes(32)), "end at byte"),
        "wrong shape": (_tensors({"a": _tensor("F32", [5], 0, 16)}, bytes(16)), "no sense"),
        "negative": (_tensors({"a": _tensor("F32", [-4], 0, -16)}, bytes(16)), "no sense"),
        "unknown type": (_tensors({"a": _tensor("P8", [4], 0, 16)}, bytes(16)), "unknown type"),
        "overflow": (
            _tensors({"a": _tensor("F32", [1 << 40, 1 << 40], 0, 16)}, bytes(16)),
            "no sense",
        ),
        "metadata": (_tensors({"__metadata__": {"a": 1}} | tensors, bytes(16)), "map of texts"),
        "config list": (instead(b"adapter_config.json", b"[]"), "not a JSON object"),
        "unknown kind": (instead(b"adapter_config.json", b'{"peft_type": "X"}'), "not supported"),
        "soft length": (
            instead(
                b"adapter_config.json",
                b'{"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 1e9}',
            ),
            "num_virtual_tokens",
        ),
    }


def manifests() -> dict[str, tuple[bytes, str]]:
    wrong = {"files": {"adapter_config.json": "0" * 64}}
    return {
        "huge": (_manifest(description="x" * (1 << 20)), "are allowed"),
        "deep": (_manifest_text("[" * 100_000), "not plain JSON"),
        "nested": (_manifest(routing=_nested(40)), "nested deeper"),
        "many values": (_manifest(capabilities=["x"] * 60_000), "more than"),
        "twice": (_manifest_text('{"name": "a", "name": "b"}'), "twice"),
        "nan": (_manifest_text('{"perf": {"a": NaN}}'), "NaN"),
        "infinite": (_manifest_text('{"perf": {"a": 1e999}}'), "too large"),
        "long number": (_manifest_text('{"perf": {"a": ' + "9" * 5000 + "}}"), "refused"),
        "name": (_manifest(name="../evil"), "no name for an expert"),
        "name with @": (_manifest(name="a@b"), "no name for an expert"),
        "no name": (_manifest(name=None), "no name for an expert"),
        "version": (_manifest(version="1.0/../.."), "no version"),
        "version type": (_manifest(version=1.0), "no version"),
        "schema": (_manifest(schema_version="9.0"), "schema_version"),
        "schema type": (_manifest(schema_version=["2.0"]), "schema_version"),
        "escape code": (_manifest(description="\x1b]0;owned\x07"), "control characters"),
        "override": (_manifest(description="abc\u202edef"), "control characters"),
        "surrogate": (_manifest_text('{"name": "\\ud800"}'), "control characters"),
        "text as list": (_manifest(capabilities="x"), "is not a list"),
        "list as map": (_manifest(integrity=[]), "is not an object"),
        "base": (_manifest(base_models=[1]), "without a name"),
        "bases": (_manifest(base_models={"a": 1}), "no list of models"),
        "fingerprint": (_manifest(base_models=[{"name": "a", "fingerprint": "b"}]), "no sha256"),
        "wrong digest": (
            _manifest(integrity={"files": dict.fromkeys(_files(), "0" * 64)}),
            "not its manifest's",
        ),
        "missing file": (_manifest(integrity={"files": {"a.json": "0" * 64}}), "manifest"),
        "unlisted file": (_manifest(integrity=wrong), "manifest"),
        "digests": (_manifest(integrity={"files": {"a": "b"}}), "no map of sha256"),
        "two adapters": (
            _manifest(schema_version="1.0", adapters=[{}, {}], base_model="a"),
            "one adapter",
        ),
        "adapter elsewhere": (
            _manifest(schema_version="1.0", adapters=[{"path": "../x"}], base_model="a"),
            "is not adapter_model",
        ),
    }


def _files() -> list[str]:
    return ["adapter_config.json", "adapter_model.safetensors"]


def _nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(depth):
        made = {"a": made}
    return made


def every() -> dict[str, tuple[bytes, str]]:
    """Name of the attack -> the package, and words of its refusal."""
    groups = {"name": names(), "kind": kinds(), "content": contents(), "manifest": manifests()}
    return {f"{group}: {case}": made for group, c in groups.items() for case, made in c.items()}
