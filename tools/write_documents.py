"""Write what the documents take from the code and its tests: the tables of reasons and of versions of torch."""

import json
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = ROOT / "tools/tested_versions.json"


def reasons() -> list[str]:
    from torch_nhwc import Reason

    rows = [f"| `{reason.name}` | {reason.value} |" for reason in Reason]
    return ["| code | the site ... |", "| --- | --- |", *rows]


def versions() -> list[str]:
    rows = json.loads(VERSIONS.read_text())
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


TABLES: dict[str, Callable[[], list[str]]] = {"messages.md": reasons, "limits.md": versions}


def written(document: str) -> tuple[Path, str]:
    """Return a document's path, and its text with its table between the marks that have the table's name."""
    path, table = ROOT / "docs" / document, TABLES[document]
    begin, end = f"<!-- {table.__name__} -->", f"<!-- end of {table.__name__} -->"
    before, _, rest = path.read_text().partition(begin)
    _, _, after = rest.partition(end)
    return path, before + "\n".join([begin, *table(), end]) + after


def main() -> None:
    for document in TABLES:
        path, text = written(document)
        path.write_text(text)


if __name__ == "__main__":
    main()
