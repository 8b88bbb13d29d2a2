"""Untrusted JSON: bounded in size, one meaning only, refused in a sentence."""

from ..budget import budget
from ..documents import check_object, parse_json
from ..errors import within
from ..records import Json
from .bytes import ByteSource, Folder


def parse_object(data: bytes | bytearray, *, name: str) -> Json:
    """The JSON object in `data`; fails on anything else, and on keys that occur twice."""
    with within(name):
        budget().check("json bytes", len(data))
        return check_object(parse_json(data, constant=float))  # configs of transformers hold Infinity


def read_object(source: ByteSource) -> Json:
    """The JSON object that a whole file holds."""
    with within(source.name):
        budget().check("json bytes", source.size)
    return parse_object(source.read(0, source.size), name=source.name)


def read_config(folder: Folder) -> Json:
    """`config.json` of a folder, or what Meta and Mistral call it, or nothing."""
    source = folder.find("config.json") or folder.find("params.json")
    return read_object(source) if source else {}
