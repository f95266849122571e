"""service/validate: who judges which answer, what is found, and that nobody is held up by it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.events import ValidationResult
from coterie.core.request import ResponseFormat
from coterie.service.validate import child as judge
from coterie.service.validate.base import MAX_CHARACTERS, MAX_ERROR, AnswerContext, blocks
from coterie.service.validate.code import GRAMMARS
from coterie.service.validate.health import GOOD_CODE, good_answer
from coterie.service.validate.json_text import JsonValidator
from coterie.service.validate.table import VALIDATORS
from coterie.service.validate.validators import AnswerValidators

Check = Callable[[str, AnswerContext], ValidationResult | None]
CODE = AnswerContext(task_type="code_generation")
PYTHON = AnswerContext(task_type="code_generation", code_language="python")


@pytest.fixture(scope="module")
def check() -> Iterator[Check]:
    with asyncio.Runner() as runner:
        validators = AnswerValidators()
        yield lambda text, context: runner.run(validators.validate(text, context))
        runner.run(validators.close())
    assert not [c for c in psutil.Process().children() if "validate.child" in " ".join(c.cmdline())]


def schema(value: Any) -> AnswerContext:
    return AnswerContext(ResponseFormat("json_schema", json.dumps(value)))


FENCED = "Here it is:\n```{}\n{}\n```\nDone."
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}

CPP = "Here:\n```c++\nint main() { return 0; }\n```"

CASES = [
    # (text, context, validator, whether it is valid, part of the error)
    ('{"a": [1, 2]}', AnswerContext(task_type="json_parsing"), "json", True, ""),
    (FENCED.format("json", '{"a": 1}'), AnswerContext(task_type="json_parsing"), "json", True, ""),
    (
        FENCED.format("json", '{"a": 1'),
        AnswerContext(task_type="json_parsing"),
        "json",
        False,
        "trunc",
    ),
    ("a: 1", AnswerContext(task_type="json_parsing"), "json", False, "malformed"),
    ("NaN", AnswerContext(task_type="json_parsing"), "json", False, "malformed"),
    ('{"a": 1}', AnswerContext(ResponseFormat("json_object")), "json", True, ""),
    ("[1]", AnswerContext(ResponseFormat("json_object")), "json", False, "not a JSON object"),
    (
        FENCED.format("", "{}"),
        AnswerContext(ResponseFormat("json_object")),
        "json",
        False,
        "malformed",
    ),
    ('{"x": 3}', schema(POINT), "json_schema", True, ""),
    ('{"x": "3"}', schema(POINT), "json_schema", False, "$.x: '3' is not of type 'integer'"),
    ("{}", schema(POINT), "json_schema", False, "'x' is a required property"),
    ("{", schema(POINT), "json_schema", False, "truncated"),
    ("def f(x):\n    return x\n", PYTHON, "python", True, ""),
    ("  x = 1\n  y = 2\n", PYTHON, "python", True, ""),
    ("def f(x:\n    return x\n", PYTHON, "python", False, "line 1"),
    ("x = 1\0", PYTHON, "python", False, "null bytes"),
    (FENCED.format("python", "print('\\d')"), CODE, "python", True, ""),
    (FENCED.format("py", "print('"), CODE, "python", False, "unterminated"),
    ("```python\nx = (1,\n", CODE, "python", False, "never closed"),
    (FENCED.format("rust", "fn main() { let x = 1; }"), CODE, "rust", True, ""),
    (FENCED.format("js", "let x = ;"), CODE, "javascript", False, "line 1"),
    (FENCED.format("ts", "const x: number = 1;"), CODE, "typescript", True, ""),
    (FENCED.format("go", "func f() int { return 1 }"), CODE, "go", True, ""),
    (FENCED.format("c++", "int main() { return 0; }"), CODE, "cpp", True, ""),
    (FENCED.format("java", "class A { void f( { }"), CODE, "java", False, "java"),
    (FENCED.format("sh", "for f in *; do echo $f; done"), CODE, "bash", True, ""),
    (FENCED.format("sql", "SELECT a FROM t WHERE b = 1;"), CODE, "sql", True, ""),
    ("SELEC a FROM", AnswerContext(None, "code_generation", "sql"), "sql", False, "sql"),
    ("```rust\nfn a() {}\n```\n```python\nx = (\n```", CODE, "rust", False, "never closed"),
    # a block without a language beside one with it shows what the program prints
    (f"{CPP}\nIt prints:\n```\nhello, world: 3\n```\n", CODE, "cpp", True, ""),
    (f"{CPP}\nIt prints:\n```\nhello: 3\n```\n", AnswerContext(checks=("cpp",)), "cpp", True, ""),
    ("```\n$ ./a.out 3\n```\n```py\nprint(3)\n```", PYTHON, "python", True, ""),
    (
        '```json\n{"a": 1}\n```\nfrom\n```\na = 1\n```',
        AnswerContext(task_type="json_parsing"),
        "json",
        True,
        "",
    ),
    # but not if no block names the language
    ("```\nint main( {\n```", AnswerContext(checks=("cpp",)), "cpp", False, "line 1"),
    # comments are no program
    ("-----------", AnswerContext(checks=("sql",)), "sql", False, "only comments"),
    ("-- the users\n/* all */", AnswerContext(checks=("sql",)), "sql", False, "only comments"),
    ("-- the users\nSELECT name FROM users;", AnswerContext(checks=("sql",)), "sql", True, ""),
    ("# nothing here", PYTHON, "python", False, "only comments"),
    ("```python\n# pip install ada\n```\n```python\nimport ada\n```", PYTHON, "python", True, ""),
    (
        "```sql\n-- all\n```\n```sql\nSELECT 1;\n```",
        AnswerContext(checks=("sql",)),
        "sql",
        True,
        "",
    ),
    (
        "```sql\n-- a\n```\n```sql\n-- b\n```",
        AnswerContext(checks=("sql",)),
        "sql",
        False,
        "only c",
    ),
    (
        "```sql\n-- a\n```\n```sql\nSELEC 1;\n```",
        AnswerContext(checks=("sql",)),
        "sql",
        False,
        "syn",
    ),
    ("some cobol", AnswerContext(None, "code_generation", "cobol"), "generic", True, ""),
    ("hello", AnswerContext(task_type="conversation"), "generic", True, ""),
    (" \n", AnswerContext(task_type="conversation"), "generic", False, "empty"),
    ("abc", AnswerContext(ResponseFormat("regex", "[a-c]+")), "grammar", True, ""),
    (
        " a-b\n",
        AnswerContext(None, "transformation", answer_pattern="[a-z-]+"),
        "pattern",
        True,
        "",
    ),
    (
        "a b",
        AnswerContext(None, "transformation", answer_pattern="[a-z-]+"),
        "pattern",
        False,
        "form",
    ),
    ("a" * 40 + "b", AnswerContext(answer_pattern="(a+)+"), "pattern", False, "longer than"),
    (
        "ab",
        AnswerContext(ResponseFormat("lark", "start: /abc/"), finish_reason="length"),
        "grammar",
        False,
        "length",
    ),
]


@pytest.mark.parametrize(("text", "context", "validator", "valid", "error"), CASES)
def test_an_answer_is_judged_by_what_it_should_be(
    check: Check, text: str, context: AnswerContext, validator: str, valid: bool, error: str
) -> None:
    result = check(text, context)
    assert result is not None
    assert (result.validator, result.valid) == (validator, valid), result
    assert (result.error is None) == valid and error in (result.error or "")


def test_what_nobody_knows_is_not_judged(check: Check) -> None:
    assert check("hello", AnswerContext()) is None
    assert check("x" * (MAX_CHARACTERS + 1), PYTHON) is None


DEEP = {
    "unary": "-" * 100_000 + "1",
    "parentheses": "(" * 100_000,
    "attributes": "a" + ".a" * 60_000,
    "sum": "a" + "+a" * 40_000,
    "lambda": "lambda:" * 20_000 + "0",
    "subscripts": "a" + "[0]" * 20_000,
    "blocks": "".join(f"{' ' * i}if x:\n" for i in range(500)),
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_python_is_refused_and_breaks_nothing(check: Check, name: str) -> None:
    result = check(DEEP[name], PYTHON)
    assert result is not None and not result.valid and result.error, result
    after = check("x = 1", PYTHON)
    assert after is not None and after.valid


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 100_000, '"' + "x" * 900_000 + '"'])
def test_deep_and_huge_json_breaks_nothing(check: Check, text: str) -> None:
    for context in (AnswerContext(task_type="json_parsing"), schema({"type": "array"})):
        result = check(text, context)
        assert result is not None and len(result.error or "") <= MAX_ERROR
        assert result.valid == (text[0] == '"' and context.task_type == "json_parsing")


@pytest.mark.parametrize(
    "unusable",
    [
        {"type": "nonsense"},
        {"$ref": "http://127.0.0.1:9/x"},
        # a name as JavaScript writes it: the grammar enforces the pattern, Python cannot read it
        {"type": "string", "pattern": "^(?<letter>a)$"},
    ],
)
def test_a_schema_that_cannot_be_checked_says_nothing_of_the_answer(
    check: Check, unusable: Any
) -> None:
    assert check('"a"', schema(unusable)) is None
    # the check itself works, for everybody else
    found = check('"a"', schema({"type": "string"}))
    assert found is not None and found.valid
    # what is no JSON is invalid whatever the schema says
    broken = check('"a', schema(unusable))
    assert broken is not None and not broken.valid


EVIL = schema({"type": "string", "pattern": "^(a+)+$"})


def test_a_pattern_that_never_ends_is_cut_off_beside_the_event_loop() -> None:
    evil = json.dumps("a" * 60 + "!")

    async def main() -> list[float]:
        validators = AnswerValidators()
        await validators.validate('"a"', EVIL)
        validators._processes._check_s = 0.3
        gaps: list[float] = []

        async def beat() -> None:
            while True:
                at = time.perf_counter()
                await asyncio.sleep(0.005)
                gaps.append(time.perf_counter() - at)

        beating = asyncio.create_task(beat())
        results = await asyncio.gather(*(validators.validate(evil, EVIL) for _ in range(2)))
        beating.cancel()
        for result in results:
            assert result is not None and not result.valid
            assert result.error == "checking it took longer than 0.3 s"
        after = await validators.validate('"aa"', EVIL)
        assert after is not None and after.valid
        await validators.close()
        return gaps

    gaps = sorted(asyncio.run(main()))
    assert gaps[len(gaps) // 2] < 0.1, "the event loop was held up"


@pytest.mark.parametrize(
    ("slow", "text"),
    [
        # Python tries 2 to the 40 ways before the second half of the pattern
        ({"type": "string", "pattern": "^(a+)+$|^a*!$"}, json.dumps("a" * 40 + "!")),
        ({"type": "array", "items": {"$ref": "#"}}, "[" * 400 + "]" * 400),
    ],
)
def test_a_slow_schema_is_not_the_fault_of_an_answer_that_it_constrained(
    slow: Any, text: str
) -> None:
    async def main() -> None:
        validators = AnswerValidators()
        free, enforced = schema(slow), replace(schema(slow), is_enforced=True)
        await validators.validate('"a"', free)
        validators._processes._check_s = 1.0
        try:
            found = await validators.validate(text, free)
            assert found is not None and not found.valid
            assert await validators.validate(text, enforced) is None
            # the check works, and says what it finds
            found = await validators.validate("1", enforced)
            assert found is not None and not found.valid
            assert not validators.health.broken
        finally:
            await validators.close()

    asyncio.run(main())


def test_a_built_in_check_that_is_broken_says_nothing() -> None:
    """It hangs on a good answer too, or its parser is not installed: nothing is known then."""

    async def main() -> None:
        validators = AnswerValidators()
        evil = json.dumps("a" * 60 + "!")
        await validators.validate('"a"', EVIL)
        # no answer at all comes in this time
        validators._processes._check_s = 1e-9
        assert await validators.validate(evil, EVIL) is None
        assert validators.health.broken == {"json_schema": 1}
        validators._processes._check_s = 5.0
        assert await validators.validate('"a"', EVIL) is None
        assert validators.health.broken == {"json_schema": 2}
        validators.health._again_at.clear()
        found = await validators.validate('"a"', EVIL)
        assert found is not None and found.valid
        await validators.close()

    asyncio.run(main())


@pytest.mark.parametrize("validator", sorted(VALIDATORS))
def test_every_built_in_check_accepts_its_good_answer(validator: str) -> None:
    for argument in GOOD_CODE if validator == "code" else [""]:
        own, text = good_answer(validator, argument)
        assert VALIDATORS[validator](own).check(text).valid, (validator, argument)
    assert set(GRAMMARS) | {"", "python"} == set(GOOD_CODE)


def test_a_missing_parser_is_no_fault_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRAMMARS, "sql", ("tree_sitter_of_nobody", "language"))
    found = judge._result(judge.ValidationTask("code", "sql", "SELECT a FROM t;"))
    assert isinstance(found, ValidationResult) and found.validator == ""
    assert "pip install" in str(found.error)


def test_a_judge_that_dies_is_replaced(check: Check) -> None:
    before = check("x = 1", PYTHON)
    assert before is not None and before.valid
    for child in psutil.Process().children():
        if "validate.child" in " ".join(child.cmdline()):
            child.kill()
    after = check("x = 1", PYTHON)
    assert after is not None and after.valid


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(alphabet="`~ab\n {}[]\"'1,", max_size=80))
def test_any_text_is_judged_without_an_exception(text: str) -> None:
    for block in blocks(text):
        assert "\n```\n" not in f"\n{block.code}" or "~~~" in text or "````" in text
    result = JsonValidator().check(text)
    try:
        json.loads(text)
    except ValueError:
        assert not result.valid or "```" in text or "~~~" in text
    else:
        assert result.valid
