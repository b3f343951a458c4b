"""Text for people: tables."""

from torch_nhwc.rendering import table


def test_the_last_line_of_a_long_table_names_the_attribute_that_holds_all_rows():
    rows = [["0", "Conv2d"], ["1", "Conv2d"], ["2", "GELU"]]
    assert table(rows, ["path", "source"], most=1, name="losses").splitlines()[-1] == "... and 2 more, in .losses"
