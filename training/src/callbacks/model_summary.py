"""What a model consists of, printed before training."""

from typing import Any

from lightning.pytorch.callbacks import RichModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count


class ModelSummary(RichModelSummary):
    """Prints the modules that have parameters, with their class and number of parameters, and the sum.

    Lightning's summary has more columns, which need an example input and are 0 without one.

    Arguments:
        max_depth: down to which depth modules have a row of their own; 0 for none.
        summarize_kwargs: header_style, of the table.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        from rich import get_console
        from rich.table import Table

        columns = dict(summary_data)
        table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
        for name in ("Name", "Type", "Params"):
            table.add_column(name, justify="right" if name == "Params" else "left")
        for row in zip(*(columns[column.header] for column in table.columns)):
            if row[-1].strip() != "0":
                table.add_row(*row)
        get_console().print(table)
        counts = [get_human_readable_count(n).strip() for n in (total_parameters, trainable_parameters)]
        get_console().print("{} parameters, of which {} are trained; {:.1f} MB".format(*counts, model_size))
