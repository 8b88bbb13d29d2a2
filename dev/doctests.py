"""For the site: examples in docstrings become blocks of code, in place of quotations within quotations."""

import re

import griffe

EXAMPLE = re.compile(r"^(>>> .*(?:\n(?!\s*$).*)*)", flags=re.MULTILINE)


class Fenced(griffe.Extension):
    """Put a fence around every paragraph that begins with `>>>`."""

    def on_instance(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)
