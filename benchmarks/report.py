"""Put the figures of the results into the documents: text between marks, `<!-- figures: NAME -->`, and pictures.

    python benchmarks/report.py

The documents say nothing about speed that does not come from here. `BLOCKS` has what makes the text of each mark, and
the files of results that it is made of; `PICTURES` has the same for each picture.
"""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import figures_gpu
import figures_layers
import figures_peers
import figures_weights
import pictures
from layout_models import MODES
from tables import Row, commits

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
QUICK = "A quick run, for the form of the tables alone: its figures mean nothing."
LAYOUTS = ("layouts-cpu", "layouts-avx2-cpu")
ONE_IMAGE = ("one-image-cpu", "one-image-avx2-cpu")
PASSES = ("passes-cpu", "passes-avx2-cpu")
ERRORS = ("errors-cpu", "errors-avx2-cpu")
LARGE = ("weights-large-avx2-cpu", "weights-large-cpu")
GPU = ("weights-cuda", "models-cuda", "layers-cuda", "operators-cuda")
MACHINES = {
    "docs/performance.md": [
        ("Whole models, and half precision", "layouts-cpu"),
        ("The same held to AVX2", "layouts-avx2-cpu"),
        ("One image, with AVX-512 and held to AVX2, and other runtimes", "one-image-cpu"),
        ("Memory", "memory-cpu"),
        ("The other ways to run a model", "peers-cpu"),
    ],
    "docs/measurements.md": [
        ("The passes of convolutions", "passes-cpu"),
        ("The same held to AVX2", "passes-avx2-cpu"),
        ("A weight that meets few positions", "positions-cpu"),
        ("The call of a replaced layer", "overhead-cpu"),
        ("Replaced layers", "layers-cpu"),
        ("Decisions of `tune`", "tune-cpu"),
        ("Where other runtimes are faster", "peers-profile-cpu"),
        ("Batches", "collate-cpu"),
        ("The bars, and one weight", "weights-cpu"),
        ("Filters larger than the first cache", "weights-large-cpu"),
        ("The conversion of whole models", "models-cpu"),
    ],
}


# What makes the text of a mark, and of which results.
Block = tuple[Callable[..., str], tuple[str, ...]]


def machine(measured: Row) -> str:
    m = measured["machine"]
    caches = ", ".join(
        f"{level.split()[0]} {size}" for level, size in m["caches"].items() if "Instruction" not in level
    )
    bounds = f", held to {m['capability']}" if m.get("bounds") else ""
    return (
        f"{m['processor']}{bounds}, {m['cores']} cores, {caches} a core or shared; level `{m['capability']}`; "
        f"huge pages: {m['huge pages']}; torch {m['environment']['torch']}; {commits(measured)}."
    )


def machines(*measured: Row, document: str) -> str:
    return "\n".join(f"- {what}: {machine(each)}" for (what, _), each in zip(MACHINES[document], measured))


def machines_of(document: str) -> Block:
    return partial(machines, document=document), tuple(name for _, name in MACHINES[document])


# By document and mark.
BLOCKS: dict[str, dict[str, Block]] = {
    "README.md": {
        "gains": (figures_layers.gains, ("layouts-cpu", "layouts-cuda")),
    },
    "docs/performance.md": {
        "machine": machines_of("docs/performance.md"),
        "layouts": (figures_layers.layouts, LAYOUTS),
        "halves": (figures_layers.halves, LAYOUTS),
        "one image": (figures_layers.one_image, ONE_IMAGE),
        "models on a gpu": (figures_gpu.whole_models, ("layouts-cuda",)),
        "conditions of peers": (figures_peers.conditions, ("peers-cpu",)),
        **{f"peers in {mode}": (partial(figures_peers.speeds, mode=mode), ("peers-cpu",)) for mode in MODES},
        "peers on one image": (partial(figures_peers.speeds, mode="inference"), ("peers-one-image-cpu",)),
        "memory": (figures_layers.memory, ("memory-cpu",)),
    },
    "docs/measurements.md": {
        "machine": machines_of("docs/measurements.md"),
        "passes": (figures_layers.passes, PASSES),
        "positions": (figures_layers.positions, ("positions-cpu",)),
        "errors": (figures_layers.errors, ERRORS),
        "overhead": (figures_layers.overhead, ("overhead-cpu",)),
        "calls": (figures_layers.calls, ("overhead-cpu",)),
        "losses": (figures_layers.losses, ("layers-cpu",)),
        "preserving bars": (figures_layers.bars, ("layers-cpu", *LAYOUTS)),
        "tuning bars": (figures_layers.bars_of_decisions, ("tune-cpu",)),
        "decisions": (figures_layers.decisions, ("tune-cpu",)),
        "costs of peers": (figures_peers.costs, ("peers-cpu",)),
        "faults of peers": (figures_peers.faults, ("peers-cpu",)),
        "causes": (figures_peers.causes, ("peers-profile-cpu",)),
        "batches": (figures_layers.batches, ("collate-cpu",)),
        "bars": (figures_weights.bars, ("weights-cpu",)),
        "sizes": (figures_weights.sizes, ("weights-cpu",)),
        "large filters": (figures_weights.large_filters, LARGE),
        "models": (figures_weights.models, ("models-cpu",)),
        "gain": (figures_weights.gain, ("models-cpu",)),
        "cuda": (figures_gpu.section, GPU),
    },
}
PICTURES: dict[str, Block] = {
    "docs/kept.svg": (pictures.kept, ("kept-cpu",)),
    "docs/performance.svg": (pictures.performance, ("layouts-cpu",)),
}


@cache
def load(name: str) -> Row:
    """Return what a script measured; no results if it did not run."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {"results": []}


def written(block: Block) -> str:
    """Return the text of a mark, after a warning if some of its results are of a quick run."""
    make, names = block
    measured = [load(name) for name in names]
    warning = f"**{QUICK}**\n\n" if any(each.get("quick") for each in measured) else ""
    return warning + make(*measured)


def documents() -> dict[Path, dict[str, str]]:
    """Return the figures between the marks of each document."""
    return {
        ROOT / document: {mark: written(block) for mark, block in blocks.items()} for document, blocks in BLOCKS.items()
    }


def drawn() -> dict[Path, str]:
    """Return the pictures of the documents."""
    return {ROOT / path: make(*map(load, names)) for path, (make, names) in PICTURES.items()}


def main() -> None:
    for path, image in drawn().items():
        path.write_text(image)
    for document, figures in documents().items():
        text = document.read_text()
        for mark, figure in figures.items():
            begin, end = f"<!-- figures: {mark} -->\n", "<!-- end of figures -->"
            before, found, rest = text.partition(begin)
            assert found, (document, mark)
            text = f"{before}{begin}{figure}\n{end}{rest.partition(end)[2]}"
        document.write_text(text)


if __name__ == "__main__":
    main()
