"""Running `locater` inside the tests as the shell would: arguments in, exit code and both streams out."""

import contextlib
import io
import sys
from typing import NamedTuple
from unittest import mock

from locater.cli import program


class Result(NamedTuple):
    code: int
    out: str
    err: str


def locater(*arguments: object, columns: int = 80) -> Result:
    """The command's own `main`, so that refusals and exit codes are the real ones."""
    out, err = io.StringIO(), io.StringIO()
    argv = ["locater", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict("os.environ", {"COLUMNS": str(columns), "TERM": "dumb"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            program.main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return Result(code, out.getvalue(), err.getvalue())
