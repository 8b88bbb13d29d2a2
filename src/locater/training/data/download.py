"""WikiText-2 through `datasets`, for users with a network; a hub that does not answer is not waited for."""

import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...errors import refusal
from .text import Corpus

WIKITEXT = "wikitext-2"
SECONDS = 5.0


def download() -> Corpus:
    """WikiText-2 at word level, from the hub or from what was downloaded before."""
    remedy = "name a folder with train.txt and valid.txt by --data PATH"
    try:
        from datasets import load_dataset
    except ImportError:
        raise refusal("the package datasets, to download WikiText-2", "none", remedy) from None
    try:
        with _offline_if_silent():
            found = load_dataset("Salesforce/wikitext", "wikitext-2-v1")
    except Exception as reason:  # whatever a hub, a proxy or a disk may do
        raise refusal("WikiText-2 from the Hugging Face hub", f"{reason!s:.120}", remedy) from None
    train, valid = (_lines(found[part]["text"]) for part in ("train", "validation"))  # type: ignore
    return Corpus(WIKITEXT, train, valid)


def _lines(rows: Iterable[str]) -> str:
    """The text of which each row is a line: the hub's copy has lost the end of blank ones, which is a token too."""
    return "".join(row.rstrip("\n") + "\n" for row in rows)


@contextmanager
def _offline_if_silent() -> Iterator[None]:
    """Without an answer `datasets` would try again for half a minute; offline it goes straight to its cache."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or not answers(config.HF_ENDPOINT)
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def answers(address: str) -> bool:
    """Whether anything speaks HTTP there, be it an error."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True
