"""Verdicts as a table for people, a document for programs, and a page for the docs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from statefork.testing.fidelity.runner import WAYS, Result, Verdict
from statefork.testing.fidelity.suite import KINDS

__all__ = ["as_document", "as_page", "line", "summary"]

_MARKS = {
    Verdict.PASSED: "ok",
    Verdict.REFUSED: "refused",
    Verdict.FAILED: "FAILED",
    Verdict.NOT_CLAIMED: "-",
    Verdict.SKIPPED: "skipped",
}
_NOT_RUN = "not run"


def line(result: Result) -> str:
    """One case for a terminal; reasons follow below the table."""
    marks = "  ".join(f"{_MARKS[result.outcomes[way].verdict]:<8}" for way in WAYS)
    return f"{result.kind + '/' + result.case:<40}{marks}{result.duration_ms / 1000:7.1f} s"


def summary(results: Sequence[Result]) -> str:
    counts = Counter(result.verdict for result in results)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])


def as_document(backend: str, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "backend": backend,
        "cases": [
            {
                "case": result.case,
                "kind": result.kind,
                "summary": result.summary,
                "verdict": str(result.verdict),
                "ways": {way: str(one.verdict) for way, one in result.outcomes.items()},
                "message": result.message,
                "duration_ms": round(result.duration_ms, 1),
            }
            for result in results
        ],
        "counts": {str(verdict): count for verdict, count in Counter(result.verdict for result in results).items()},
    }


def as_page(documents: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of one column for each backend; `ok` means all three ways. The first document has all cases."""
    names = [document["backend"] for document in documents]
    by_name = [{f"{case['kind']}/{case['case']}": case for case in document["cases"]} for document in documents]
    lines = []
    for kind in KINDS:
        lines += [f"### {kind}", "", f"| case | what | {' | '.join(names)} |", f"| --- | --- |{' --- |' * len(names)}"]
        for key, case in by_name[0].items():
            if case["kind"] == kind:
                cells = " | ".join(_MARKS[Verdict(found[key]["verdict"])] if key in found else _NOT_RUN for found in by_name)
                lines.append(f"| {case['case']} | {case['summary'].replace('|', chr(92) + '|')} | {cells} |")
        lines.append("")
    return "\n".join(lines)
