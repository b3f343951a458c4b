"""The table on what `verify` finds, from `verify-cpu.json`."""

from bench_verify import FAULTS, is_met
from tables import table


def findings(measured: dict) -> str:
    """Return the table of planted and found faults, and of false alarms."""
    results = measured["results"]
    rows = []
    for fault in FAULTS:
        planted = [row for row in results if fault in row["planted"]]
        found = sum(fault in row["found"] for row in planted)
        rows.append([f"{fault}: planted in {len(planted)} cases", "all found", str(found), met(found == len(planted))])
    firsts = sum(row["first"] == next(iter(row["planted"].values())) for row in results)
    rows.append(["the first layer that differs is the first planted", "all", str(firsts), met(firsts == len(results))])
    alarms = sum(len(row["false_alarms"]) for row in results)
    comparisons = sum(row["comparisons"] for row in results)
    rows.append(
        [f"false alarms, {comparisons:,} things compared with and without faults", "0", str(alarms), met(alarms == 0)]
    )
    head = [f"{len(results)} cases: models, dtypes and modes", "bar", "measured", "met"]
    unmet = ", ".join(f"{row['model']} {row['dtype']} {row['mode']}" for row in results if not is_met(row))
    return table(head, rows) + (f"\n\nNot met by {unmet}." if unmet else "")


def met(is_so: bool) -> str:
    return "yes" if is_so else "no"
