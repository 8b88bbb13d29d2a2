"""`locater doctor`: what is installed, what this machine offers, and what each missing library would give."""

import platform
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated

import typer
from rich.console import Console

from ..errors import counted, install
from ..records import Json
from .output import console_for, table
from .results import JsonPath, save_result

# What each extra is for; which libraries it means stands in the package's own metadata.
EXTRAS = {
    "hub": "models of the Hugging Face hub, by their ids",
    "hf": "prediction, families by proof, callbacks of the Trainer; hub ids too",
    "data": "WikiText-2 for locater train",
    "gguf": "GGUF files (llama.cpp, Ollama)",
    "remote": "https:// and s3:// addresses, read by byte range",
    "plot": "pictures: --plot",
    "report": "data frames and Parquet",
    "lightning": "callbacks of Lightning",
    "ray": "sweeps on a Ray cluster",
    "tensorboard": "metrics in TensorBoard",
}


def doctor(
    json: JsonPath = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 if a core library is missing.")] = False,
) -> None:
    """Show versions, devices and extras: what works here, and what to install for the rest."""
    from .. import __version__
    from ..errors import Refusal

    core = {name: installed(name) for name in libraries()}
    document = {
        "schema": "locater.doctor/1",
        "locater": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": devices(),
        "core": core,
        "extras": {extra: {name: installed(name) for name in libraries(extra)} for extra in EXTRAS},
    }
    show(document, console_for(json))
    save_result(document, json=json)
    if strict and (missing := [name for name, number in core.items() if number is None]):
        raise Refusal(f"expected every core library, {', '.join(missing)} missing; install with: pip install locater")


def installed(name: str) -> str | None:
    """The version of a distribution, None where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def libraries(extra: str | None = None) -> list[str]:
    """The distributions that an extra names, or those that everything needs.

    >>> libraries("plot")
    ['matplotlib']
    """
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in requires("locater") or ()]
    if extra is None:
        return [one.name for one in wanted if one.marker is None]
    return [one.name for one in wanted if one.marker and one.marker.evaluate({"extra": extra})]


def devices() -> list[str]:
    """Devices that torch can compute on here."""
    try:
        import torch
    except ImportError:
        return []
    names = [f"cpu, {counted(torch.get_num_threads(), 'thread')}"]
    names += [f"cuda:{n}, {torch.cuda.get_device_name(n)}" for n in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return names


def show(document: Json, console: Console) -> None:
    """The document as a person reads it: what is there, then what is missing and the line that brings it."""
    console.print(f"locater {document['locater']}, Python {document['python']}, {document['platform']}", markup=False)
    console.print(f"devices: {'; '.join(document['devices']) or 'torch is not installed'}\n", markup=False)
    core = document["core"]
    console.print("core: " + ", ".join(f"{name} {number or 'MISSING'}" for name, number in core.items()), markup=False)
    console.print()
    body = []
    for extra, versions in document["extras"].items():
        absent = [name for name, number in versions.items() if number is None]
        body.append([extra, f"without {', '.join(absent)}" if absent else "yes", EXTRAS[extra]])
    console.print(table(["extra", "installed", "gives"], body, words=["extra", "installed", "gives"]))
    if missing := [row[0] for row in body if row[1] != "yes"]:
        console.print(f"\nfor the rest: {install(*missing)}", markup=False, soft_wrap=True)
