"""A result of the demo as a table; it needs the extra `cli`."""

from rich.table import Table

from torch_nhwc.cli.demo import Result
from torch_nhwc.rendering import amount, several

_NO_DIFFERENCE = "no measurable difference"


def as_table(result: Result) -> Table:
    """What was converted, how long it took, and whether the outputs are those from before."""
    title = f"{result.model}, {result.dtype}, {result.device}, {several(result.threads, 'thread')}"
    table = Table(title=title, title_justify="left", show_header=False)
    for name, tally in {"converted": result.converted, "restrided": result.restrided, "kept": result.kept}.items():
        table.add_row(name, f"{several(tally.sites, 'weight')}, {amount(tally.bytes)}")
    for left in result.left:
        table.add_row("left as it is", left)
    stock = " (torch.nn.utils skips TorchScript layers)"
    if result.stock_convert_ms is not None:
        ratio = result.stock_convert_ms / result.convert_ms
        change = f"{ratio:.1f}x ours" if result.measurable["stock_over_ours"] else _NO_DIFFERENCE
        stock = f"; torch.nn.utils {result.stock_convert_ms:.2f} ms: {change}"
    table.add_row("conversion", f"{result.convert_ms:.2f} ms{stock}")
    before = result.forward_contiguous_ms
    for label, name, after in (
        ("weights converted", "converted", result.forward_converted_ms),
        ("input channels-last as well", "channels_last_input", result.forward_channels_last_input_ms),
    ):
        change = f"{before / after:.2f}x faster" if after < before else f"{after / before:.2f}x slower"
        change = change if result.measurable[name] else _NO_DIFFERENCE
        table.add_row(f"forward, {label}", f"{after:.1f} ms; contiguous {before:.1f} ms: {change}")
    table.add_row("weights", "equal bit for bit" if result.weights_equal else "[red]DIFFERENT[/red]")
    verdict = "within" if result.largest_difference <= result.tolerance else "[red]BEYOND[/red]"
    table.add_row(
        "largest output difference",
        f"{result.largest_difference:.2g}, {verdict} the tolerance {result.tolerance:.2g} "
        f"(largest output {result.largest_output:.2g})",
    )
    return table
