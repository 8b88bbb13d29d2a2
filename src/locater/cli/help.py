"""Help that can be read at 80 columns."""

from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

NARROW = 72


class Program(TyperGroup):
    """Help that names the options for completion in its last sentence: in the list, a narrow terminal cuts them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for option in self.params:
            if isinstance(option, TyperOption) and option.name in ("install_completion", "show_completion"):
                option.hidden = True
        super().format_help(ctx, formatter)


class Help(TyperCommand):
    """Frames round the options where there is room: in a narrow terminal they cut the names of options."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if formatter.width < NARROW:
            self.rich_markup_mode = None
        super().format_help(ctx, formatter)
