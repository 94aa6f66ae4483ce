"""What `kubectl kustomize` makes of a folder, by those features alone that deploy/ uses."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

FILE = "kustomization.yaml"
_FIELDS = {"apiVersion", "kind", "resources", "images", "configMapGenerator", "namespace", "patches"}


def load(file: Path) -> list[Document]:
    return list(yaml.safe_load_all(file.read_text()))


def render(folder: Path, documents: Sequence[Document] = ()) -> list[Document]:
    """Generated names come without the hash that ends them.

    documents: what the folder is applied to, if it is a component
    """
    (kustomization,) = load(folder / FILE)
    assert kustomization.keys() <= _FIELDS, f"{folder} uses what this file does not know"
    rendered = deepcopy(list(documents))
    for entry in kustomization.get("resources", []):
        path = folder / entry
        rendered += render(path) if path.is_dir() else load(path)
    rendered += [_config_map(generator) for generator in kustomization.get("configMapGenerator", [])]
    for document in rendered:
        if "namespace" in kustomization:
            document["metadata"]["namespace"] = kustomization["namespace"]
        _set_images(document, kustomization.get("images", []))
        for patch in kustomization.get("patches", []):
            _apply(document, patch)
    return rendered


def _config_map(generator: Document) -> Document:
    data = dict(literal.split("=", 1) for literal in generator["literals"])
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data}


def _set_images(document: Document, images: Sequence[Document]) -> None:
    tags = {image["name"]: image["newTag"] for image in images}
    if document["kind"] == "Deployment":
        for container in document["spec"]["template"]["spec"]["containers"]:
            if container["image"] in tags:
                container["image"] += f":{tags[container['image']]}"


def _apply(document: Document, patch: Document) -> None:
    """A JSON patch (RFC 6902) that appends to lists."""
    if document["kind"] != patch["target"]["kind"]:
        return
    for operation in yaml.safe_load(patch["patch"]):
        *steps, end = operation["path"].strip("/").split("/")
        assert (operation["op"], end) == ("add", "-")
        place: Any = document
        for step in steps:
            place = place[int(step) if isinstance(place, list) else step]
        place.append(operation["value"])
