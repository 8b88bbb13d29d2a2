"""JSON from strangers: bounded in size, one meaning only, refused in a sentence."""

import json
from typing import Any

from ..budget import budget
from ..errors import Refusal, refusal, within
from ..records import Json
from .bytes import ByteSource, Folder


def parse_object(data: bytes | bytearray, *, name: str) -> Json:
    """The JSON object in `data`; fails on anything else, and on keys that occur twice."""
    with within(name):
        budget().check("json bytes", len(data))
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates)
    except Refusal as cause:
        raise Refusal(f"{name}: {cause}") from None
    except (ValueError, RecursionError) as cause:
        reason = str(cause).splitlines()[0] or type(cause).__name__
        raise refusal(f"valid JSON in {name}", f"something else ({reason})", "fetch the file again") from None
    if not isinstance(value, dict):
        raise refusal(f"a JSON object in {name}", f"a {type(value).__name__}")
    return value


def read_object(source: ByteSource) -> Json:
    """The JSON object that a whole file holds."""
    with within(source.name):
        budget().check("json bytes", source.size)
    return parse_object(source.read(0, source.size), name=source.name)


def read_config(folder: Folder) -> Json:
    """`config.json` of a folder, or what Meta and Mistral call it, or nothing."""
    source = folder.find("config.json") or folder.find("params.json")
    return read_object(source) if source else {}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise refusal("each key once", f"{twice!r:.80} twice")
    return result
