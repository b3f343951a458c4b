"""Write what the documents take from the code: the guide's table of reasons."""

from pathlib import Path

from torch_nhwc import Reason

GUIDE = Path(__file__).parent.parent / "docs/guide.md"
BEGIN, END = "<!-- reasons -->", "<!-- end of reasons -->"


def main() -> None:
    rows = [f"| `{reason.name}` | {reason.value} |" for reason in Reason]
    before, _, rest = GUIDE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    table = [BEGIN, "| code | the site ... |", "| --- | --- |", *rows, END]
    GUIDE.write_text(before + "\n".join(table) + after)


if __name__ == "__main__":
    main()
