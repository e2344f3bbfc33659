"""Checks files against what will read them: `release_lint.py recipe FILE`, `release_lint.py kubernetes
FILE...`. Run by scripts/release-lint.sh, with its packages.

A recipe is parsed and rendered, for each architecture and Python, by rattler-build; no package is looked
up. Objects of Kubernetes are held against the schemas of its newest version, and those of Dask's operator
against that operator's definitions, both without keys that are not known.
"""

import importlib.resources
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

PLATFORMS = ["linux-64", "linux-aarch64"]
PYTHONS = ["3.11.*", "3.12.*", "3.13.*", "3.14.*"]


def recipe(path):
    """What rattler-build has against a recipe."""
    from rattler_build import PlatformConfig, RattlerBuildError, RenderConfig, Stage0Recipe, VariantConfig

    variants = VariantConfig({"python": PYTHONS, "c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"]})
    for platform in PLATFORMS:
        config = RenderConfig(PlatformConfig(target_platform=platform))
        try:
            rendered = Stage0Recipe.from_file(path).render(variants, config)
        except RattlerBuildError as error:
            yield f"{path}: {error}"
            return
        if len(rendered) != len(PYTHONS):
            yield f"{path}: renders {len(rendered)} packages for {platform}, not one for each of {PYTHONS}"


def strict(schema):
    """The schema, that allows no keys but those which it lists."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    known = {key: strict(part) for key, part in schema.items()}
    if known.get("type") == "object" and "properties" in known and "additionalProperties" not in known:
        open_ended = known.get("x-kubernetes-preserve-unknown-fields") is True
        known["additionalProperties"] = open_ended
    return known


def definitions():
    """The schemas of Dask's operator, by (apiVersion, kind)."""
    operator = importlib.resources.files("dask_kubernetes.operator.deployment")
    found = {}
    for file in operator.joinpath("helm/dask-kubernetes-operator/crds").iterdir():
        definition = yaml.safe_load(file.read_text())["spec"]
        for version in definition["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            # What every object has, and the definitions leave out.
            schema["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
            schema["properties"]["metadata"] = {"type": "object"}
            found[f"{definition['group']}/{version['name']}", definition["names"]["kind"]] = schema
    return found


def kubernetes(path, known):
    """What Kubernetes or the operator has against the objects in a file."""
    for number, thing in enumerate(yaml.safe_load_all(Path(path).read_text()), 1):
        where = f"{path}, object {number} ({thing.get('kind')})"
        schema = known.get((thing.get("apiVersion"), thing.get("kind")))
        if schema:
            for error in jsonschema.Draft202012Validator(schema).iter_errors(thing):
                yield f"{where}: {error.json_path}: {error.message}"
            continue
        try:
            kubernetes_validate.validate(thing, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{where}: {'.'.join(map(str, error.path))}: {error.message}"
        except Exception as error:  # its errors have no base: no such kind, no such version
            yield f"{where}: {error}"


def main(what, *paths):
    if what == "recipe":
        found = [problem for path in paths for problem in recipe(path)]
    else:
        known = definitions()
        found = [problem for path in paths for problem in kubernetes(path, known)]
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main(*sys.argv[1:])
