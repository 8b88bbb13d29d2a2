"""Additions by other packages, and by the laboratory, found by their entry points.

The groups are `locater.verbs` (functions of the command line), `locater.loaders` (by model type: a module with
`load_trained_model` and `load_trained_tokenizer`), `locater.folders` (folders of results as documents, None for any
other folder) and `locater.documents` (by the name of a schema: a document as one that the page draws).
"""

from importlib.metadata import EntryPoint, entry_points


def plugins(kind: str) -> dict[str, EntryPoint]:
    """The additions of one kind by their names; nothing is imported before `load()`."""
    return {point.name: point for point in entry_points(group=f"locater.{kind}")}
