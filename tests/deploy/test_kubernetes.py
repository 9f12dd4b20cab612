"""Every rendered kind against its schema, Helm values against the chart's, rules and routes with Prometheus' own tools."""

import gzip
import json
import shutil
import subprocess
from collections import Counter

import pytest
import schemas
import yaml
from where import ROOT

from weft.deploy import gpu_operator, rendering
from weft.deploy.manifests import SYSTEM

PLAIN = "nodes: [{name: pool, count: 3, gpus: 2}]\n"  # the least that is deployed
TEXTS = {
    "example": (ROOT / "examples/cluster.yaml").read_text(),
    "plain": PLAIN,
    "dra, dcgm": (ROOT / "examples/cluster.yaml").read_text().replace("{name: a100,", "{dra: true, name: a100,")
    + "monitoring: {exporter: dcgm}\n",
}


@pytest.fixture(scope="module", params=TEXTS)
def rendered(request, tmp_path_factory):
    """The specification and the texts."""
    path = tmp_path_factory.mktemp("deploy") / "cluster.yaml"
    path.write_text(TEXTS[request.param])
    made = rendering.load(path)
    return made, rendering.render(made, "kubernetes")


def objects(texts):
    skipped = ("kustomization.yaml", "gpu-operator/values.yaml")
    return [
        found
        for name, text in texts.items()
        if name.endswith(".yaml") and name not in skipped
        for found in schemas.documents(text)
    ]


def test_core_kinds_are_valid(rendered):
    seen = Counter(schemas.validate(found) for found in objects(rendered[1]) if found["apiVersion"] in schemas.CORE)
    assert {"Namespace", "ClusterRole", "ConfigMap"} <= set(seen)


@schemas.needs_schemas()
def test_custom_kinds_are_valid(rendered):
    seen = Counter(schemas.validate(found) for found in objects(rendered[1]) if found["apiVersion"] not in schemas.CORE)
    assert seen["PrometheusRule"] == 1 and seen["ClusterQueue"] == seen["LocalQueue"] == len(rendered[0].teams)
    broken = next(found for found in objects(rendered[1]) if found["kind"] == "ResourceFlavor")
    broken["spec"]["nodeLabel"] = {}
    with pytest.raises(AssertionError, match="nodeLabel"):
        schemas.validate(broken)


@schemas.needs_schemas()
def test_helm_values_have_only_keys_of_the_chart(rendered):
    values = yaml.safe_load(rendered[1]["gpu-operator/values.yaml"])
    chart = yaml.safe_load(gzip.decompress((schemas.FOLDER / "gpu-operator-values.yaml.gz").read_bytes()))
    assert schemas.unknown_values(values, chart) == []
    assert schemas.unknown_values({"devicePlugin": {"config": {"nam": ""}}}, chart) == ["devicePlugin.config.nam"]


def test_names_of_configmaps_match_the_values(rendered):
    _, texts = rendered
    values = yaml.safe_load(texts["gpu-operator/values.yaml"])
    plugin, mig = (yaml.safe_load(texts[f"gpu-operator/{name}.yaml"]) for name in ("device-plugin", "mig"))
    assert values["devicePlugin"]["config"]["name"] == plugin["metadata"]["name"]
    assert values["devicePlugin"]["config"]["default"] in plugin["data"]
    assert values["migManager"]["config"]["name"] == mig["metadata"]["name"]
    assert values["migManager"]["config"]["default"] in yaml.safe_load(mig["data"]["config.yaml"])["mig-configs"]
    labels = texts["nodes/label.sh"]
    for name in plugin["data"]:
        assert name == gpu_operator.EXCLUSIVE or f"{gpu_operator.PLUGIN_LABEL}={name}" in labels


def test_the_health_daemon_may_do_what_its_readme_says(rendered):
    """And its command is one that weft has."""
    from typer.testing import CliRunner

    from weft.cli import app

    readme = (ROOT / "src/weft/hardware/health/README.md").read_text()
    listed = yaml.safe_load(readme.partition("rules:\n")[2].partition("```")[0])
    found = {each["kind"]: each for each in schemas.documents(rendered[1]["health/health.yaml"])}
    assert sorted(map(str, listed)) == sorted(map(str, found["ClusterRole"]["rules"] + found["Role"]["rules"]))
    container = found["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][0] == "health"
    assert CliRunner().invoke(app, [*container["args"], "--help"]).exit_code == 0


def test_every_object_of_a_namespace_has_one_that_is_there(rendered):
    made, texts = rendered
    there = {SYSTEM, "gpu-operator", "kueue-system", made.monitoring.namespace, *(team.name for team in made.teams)}
    assert {found["metadata"].get("namespace", SYSTEM) for found in objects(texts)} <= there


def test_quotas_are_the_files(rendered):
    made, texts = rendered
    nominal = Counter()
    for found in objects(texts):
        for group in (
            found.get("spec", {}).get("resourceGroups", []) if found["kind"] in ("ClusterQueue", "Cohort") else []
        ):
            for flavor in group["flavors"]:
                assert [each["name"] for each in flavor["resources"]] == group["coveredResources"]
                nominal[flavor["name"]] += sum(
                    int(each["nominalQuota"]) for each in flavor["resources"] if "nvidia" in each["name"]
                )
    expected = Counter()
    for owner in (*made.teams, *made.cohorts):
        for quota in owner.quota:
            expected[quota.pool] += quota.nominal
    assert nominal == expected


def test_a_team_can_hold_what_it_may_borrow(rendered):
    """A ResourceQuota of the nominal quota would count it twice, and forbid to borrow."""
    made, texts = rendered
    for found in objects(texts):
        if found["kind"] == "ResourceQuota" and found["metadata"]["namespace"] == "vision":
            hard = found["spec"]["hard"]
            a100 = 0 if made.pool("a100").dra else 128  # all of the pool: what may be borrowed has no limit
            assert (
                hard["requests.nvidia.com/gpu"] == str(192 + 96 + a100)
                and hard["requests.nvidia.com/mig-1g.10gb"] == "0"
            )


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool: apt-get install prometheus")
def test_rules_and_their_tests_with_promtool(rendered, tmp_path):
    made, texts = rendered
    rendering.write({name: text for name, text in texts.items() if "/plain/" in name}, tmp_path, "kubernetes")
    folder = tmp_path / "monitoring/plain"
    run(folder, "promtool", "check", "rules", "rules.yml")
    run(folder, "promtool", "test", "rules", "rules_test.yml")
    if made.teams:
        return
    hot = f"> {made.alerts.temperature_c:g}"
    assert hot in texts["monitoring/plain/rules.yml"]
    (folder / "rules.yml").write_text(texts["monitoring/plain/rules.yml"].replace(hot, "> 1000"))
    with pytest.raises(subprocess.CalledProcessError):  # its tests can fail
        run(folder, "promtool", "test", "rules", "rules_test.yml")


@pytest.mark.skipif(not shutil.which("amtool"), reason="needs amtool: apt-get install prometheus-alertmanager")
def test_routes_with_amtool(rendered, tmp_path):
    made, texts = rendered
    (tmp_path / "a.yml").write_text(texts["monitoring/plain/alertmanager.yml"])
    assert "SUCCESS" in run(tmp_path, "amtool", "check-config", "a.yml")

    def receivers(*labels):
        return set(
            run(tmp_path, "amtool", "config", "routes", "test", "--config.file=a.yml", *labels).strip().split(",")
        )

    if made.teams:
        assert receivers("severity=critical", "namespace=vision") == {"team-vision", "on-call", "operators"}
        assert receivers("severity=info", "namespace=course") == {"operators"}
    else:
        assert receivers("severity=critical") == {"none"}


def test_expressions_of_rules_and_dashboard_are_promql(rendered):
    promql_parser = pytest.importorskip("promql_parser")
    _, texts = rendered
    board = json.loads(yaml.safe_load(texts["monitoring/dashboard.yaml"])["data"]["weft.json"])
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    expressions += [
        each["expr"]
        for group in yaml.safe_load(texts["monitoring/plain/rules.yml"])["groups"]
        for each in group["rules"]
    ]
    assert len(expressions) > 18
    for each in expressions:
        promql_parser.parse(each)
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "instance", "gpu", "team"}
    with pytest.raises(ValueError):
        promql_parser.parse("sum(")


def test_scripts_with_shellcheck(rendered, tmp_path):
    tool = shutil.which("shellcheck")
    if not tool:
        pytest.skip("needs shellcheck")
    for name, text in rendered[1].items():
        if name.endswith(".sh"):
            (tmp_path / "script.sh").write_text(text)
            run(tmp_path, tool, "script.sh")


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")
def test_kustomize_takes_the_folder(rendered, tmp_path):
    rendering.write(rendered[1], tmp_path, "kubernetes")
    built = schemas.documents(run(tmp_path, "kubectl", "kustomize", "."))
    assert len(built) == len(
        [found for found in objects(rendered[1]) if found["metadata"].get("namespace") != "gpu-operator"]
    )


def run(folder, *command):
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout
