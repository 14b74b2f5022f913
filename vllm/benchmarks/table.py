"""Markdown tables that are read as plain text, too."""


def format_table(head: list[str], lines: list[list[str]]) -> str:
    """Return a table whose columns are as wide as their widest cell.

    Args:
        lines: cells, as many in each as `head` has.
    """
    cells = [head, ["---:"] * len(head), *lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        f"| {' | '.join(map(str.rjust, line, widths))} |" for line in cells
    )
