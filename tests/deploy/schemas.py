"""Validation without a cluster: core kinds with kubernetes-validate, custom ones with the CRDs in WEFT_SCHEMAS."""

import functools
import gzip
import os
from pathlib import Path

import pytest
import yaml

FOLDER = Path(os.environ.get("WEFT_SCHEMAS", "/nowhere"))
CORE = {
    "v1",
    "apps/v1",
    "batch/v1",
    "rbac.authorization.k8s.io/v1",
    "scheduling.k8s.io/v1",
    "networking.k8s.io/v1",
    "resource.k8s.io/v1",
}


def needs_schemas():
    return pytest.mark.skipif(not FOLDER.is_dir(), reason="not verifiable here: WEFT_SCHEMAS names no folder of CRDs")


def documents(text: str) -> list[dict]:
    return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found is not None]


@functools.cache
def validator(group: str, kind: str, version: str):
    import jsonschema

    for file in FOLDER.glob(f"{group}_*.yaml.gz"):
        crd = yaml.load(gzip.decompress(file.read_bytes()), Loader=yaml.CSafeLoader)
        if crd["spec"]["names"]["kind"] != kind:
            continue
        for each in crd["spec"]["versions"]:
            if each["name"] == version:
                assert each["served"], f"{kind} {version} is not served"
                return jsonschema.Draft7Validator(_closed(each["schema"]["openAPIV3Schema"], top=True))
    raise LookupError(f"no CRD of {group} {kind} {version} in {FOLDER}")


def _closed(schema: dict, top: bool = False) -> dict:
    """An API server drops fields that a CRD does not name; here they are mistakes."""
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if key != "pattern" or "(?i)" not in value}
    if "properties" in schema:
        found["properties"] = {
            key: _closed(value) for key, value in schema["properties"].items() if not (top and key == "metadata")
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
        if top:
            found["properties"]["metadata"] = {"type": "object"}
    if isinstance(schema.get("items"), dict):
        found["items"] = _closed(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = _closed(schema["additionalProperties"])
    return found


def validate(document: dict) -> str:
    """The kind that was validated; raises what is wrong with it. Custom kinds need WEFT_SCHEMAS."""
    api, kind = document["apiVersion"], document["kind"]
    if api in CORE:
        import kubernetes_validate

        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    else:
        group, version = api.split("/")
        errors = [
            f"{'/'.join(map(str, error.absolute_path))}: {error.message}"
            for error in validator(group, kind, version).iter_errors(document)
        ]
        assert not errors, f"{kind} {document['metadata']['name']}: {errors}"
    return kind


def unknown_values(values: dict, of_chart: dict, at: str = "") -> list[str]:
    """Keys of Helm values that the chart does not have. A chart's empty mapping takes any."""
    found = []
    for key, value in values.items():
        if key not in of_chart:
            found.append(f"{at}{key}")
        elif isinstance(value, dict) and of_chart[key]:
            found += unknown_values(value, of_chart[key], f"{at}{key}.")
    return found
