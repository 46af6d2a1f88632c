"""docs/bug_cases.md against the tests: every one it names exists and carries its case number, and none is forgotten."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "bug_cases.md"
MENTION = re.compile(r"\bcases?[ _](\d+(?:(?:, | and |, and )\d+)*)", re.IGNORECASE)


@cache
def cases_of_tests() -> dict[str, set[int]]:
    """Case numbers that each test function speaks of, by "file::name"."""
    found = {}
    for path in sorted(TESTS.glob("test_*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                source = "\n".join(lines[first - 1 : node.end_lineno]).replace("test_case_", "case ")
                numbers = {int(n) for match in MENTION.findall(source) for n in re.findall(r"\d+", match)}
                found[f"{path.name}::{node.name}"] = numbers
    return found


def table() -> dict[int, tuple[str, list[str]]]:
    """What is tested and the tests named, by case."""
    rows = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0].isdecimal():
            assert len(cells) == 4 and int(cells[0]) not in rows, line
            rows[int(cells[0])] = (cells[2], re.findall(r"`([^`]+)`", cells[3]))
    return rows


def test_every_named_test_exists_and_speaks_of_its_case() -> None:
    known = cases_of_tests()
    for case, (_, names) in table().items():
        for name in names:
            assert name in known, f"case {case}: {name} does not exist"
            assert case in known[name], f"case {case}: {name} does not mention it"


def test_every_case_has_a_test_or_a_reason() -> None:
    rows = table()
    assert len(rows) > 60 and list(rows) == sorted(rows)
    for case, (what, names) in rows.items():
        assert bool(names) != what.startswith("not yet: "), case


def test_no_test_speaks_of_a_case_that_is_not_in_the_table() -> None:
    named = {(case, name) for case, (_, names) in table().items() for name in names}
    spoken = {(case, name) for name, cases in cases_of_tests().items() for case in cases if f"case_{case}_" in name}
    assert spoken <= named, sorted(spoken - named)
    assert {case for cases in cases_of_tests().values() for case in cases} <= set(table())
