"""Methods that every result has besides its JSON: a page, and a frame in a notebook."""

import html
from pathlib import Path

from ..records import Json

FRAME_HEIGHT = 760
LONGEST_REPR = 200
MOST_CHARACTERS = 6_000_000  # of a page within a notebook's file


class Shown:
    """For results with `to_json` and `summary`: shown as the page of that document, printed as that summary."""

    def to_json(self) -> Json:
        raise NotImplementedError

    def summary(self) -> str:
        """In plain words: what `print` shows."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        """Name the kind and the first line of the summary: all fields would fill a session."""
        return f"{type(self).__name__}({self.summary().partition(chr(10))[0][:LONGEST_REPR]})"

    def to_html(self, path: str | Path | None = None, *, title: str | None = None) -> str:
        """The page as text, also written to `path` if given."""
        from .page import page, save_page

        document = [self.to_json()]
        if path is not None:
            save_page(document, Path(path), title=title)
        return page(document, title=title)

    def _repr_html_(self) -> str:
        """The page in a frame that may run its own script and nothing else."""
        text = self.to_html()
        if len(text) > MOST_CHARACTERS:
            return f"<p>A page of {len(text) / 1e6:.0f} MB: write it with <code>to_html(path)</code>.</p>"
        rules = 'sandbox="allow-scripts allow-downloads"'
        style = f"width:100%;height:{FRAME_HEIGHT}px;border:0"
        return f'<iframe title="locater" {rules} style="{style}" srcdoc="{html.escape(text)}"></iframe>'
