"""Help that can be read at 80 columns: whole names in groups, each preset's default, rare options apart."""

import sys
from typing import Any

from typer.core import TyperCommand

ALL = "--help-all"
# What most runs set; the rest stands behind --help-all.
COMMON = {
    *(
        "preset",
        "config",
        "out",
        "resume",
        "json",
        "data",
        "tokenizer",
        "context",
        "num_layers",
        "num_heads",
        "d_model",
    ),
    *("dropout", "optimizer", "learning_rate", "warmup", "strength", "mean", "stabiliser", "steps", "epochs"),
    *("patience", "batch", "seed", "validate_every", "precision", "device"),
}


class GroupedHelp(TyperCommand):
    """`--help` with the common options, `--help-all` with all of them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        whole = ALL in sys.argv
        formatter.width = min(formatter.width, 88)
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        for title, options in self._groups(ctx, whole).items():
            with formatter.section(title):
                formatter.write_dl(options, col_max=34)
        if whole:
            _write_methods(formatter)
        else:
            formatter.write_paragraph()
            formatter.write_text(f"{ALL} lists the rest: norms, positions, schedules, precision, many processes.")

    def _groups(self, ctx: Any, whole: bool) -> dict[str, list[tuple[str, str]]]:
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            if whole or option.name in COMMON or option.name == "help":
                title = getattr(option, "rich_help_panel", None) or "Run"
                groups.setdefault(title, []).append((_names(option), _words(option)))
        return groups


def _write_methods(formatter: Any) -> None:
    """Every stabiliser, and below it its options."""
    from ..train.methods import METHODS

    with formatter.section("Stabilisers, and their options (--stabiliser-options a=1,b=2)"):
        rows = []
        for name, method in METHODS.items():
            rows.append((name, method.help))
            for one, setting in method.settings.items():
                default = "must be given" if setting.default is None else _shown(setting.default)
                rows.append((f"  {one}", f"{setting.help} [{default}]"))
        formatter.write_dl(rows, col_max=34)


def _names(option: Any) -> str:
    names = " / ".join([*option.opts, *option.secondary_opts])
    return names if option.is_flag else f"{names} {option.metavar or ''}".rstrip()


def _words(option: Any) -> str:
    return " ".join([option.help or "", *_default(option.name)]).strip()


def _default(name: str) -> list[str]:
    """What the presets say of an option: one value where they agree, each preset's own where they do not."""
    from ..train.config import GROUPS, PRESETS

    values = {
        preset: getattr(group, name)
        for preset, config in PRESETS.items()
        for group in (getattr(config, part) for part in GROUPS)
        if hasattr(group, name)
    }
    if not values:
        return []
    if len(set(values.values())) == 1:
        return [f"[{_shown(next(iter(values.values())))}]"]
    return ["[" + ", ".join(f"{preset} {_shown(value)}" for preset, value in values.items()) + "]"]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (f"{value:.3g}" if isinstance(value, float) and len(str(value)) > 8 else str(value)) or "none"
