"""The whole cluster file: the example, and mistakes that are named with their line."""

import re

import pytest
from where import ROOT

from weft.cluster import cluster_file, quota
from weft.cluster.files.text import TraceError
from weft.cluster.specification import read

EXAMPLE = (ROOT / "examples/cluster.yaml").read_text()


def test_the_example_is_read_by_the_simulator_too():
    made = read(ROOT / "examples/cluster.yaml")
    nodes = cluster_file.load(ROOT / "examples/cluster.yaml")
    assert nodes.total_gpus == sum(pool.gpus for pool in made.pools) == 48 * 8 + 16 * 8 + 2 * 8 + 4 * 4 + 4 * 8
    assert [pool.units for pool in made.pools] == [384, 128, 112, 64, 256]
    resources = {pool.name: pool.resource for pool in made.pools}
    assert resources == {
        "h100": "nvidia.com/gpu", "a100": "nvidia.com/gpu", "slices": "nvidia.com/mig-1g.10gb",
        "desks": "nvidia.com/gpu.shared", "serve": "nvidia.com/gpu.shared",
    }  # fmt: skip
    assert made.pool("h100").price == 2.6 and made.software.cuda == "13.0" and made.root_of("research") == "institute"


@pytest.mark.parametrize(("old", "new", "words"), [
    ("  - name: vision", "  - name: vision\n    colour: red", "@: unknown key 'colour'"),
    ("teams:", "team:", "@: unknown key 'team'; did you mean 'teams'?"),
    ("cohort: research\n    users: [ada, ben]", "cohort: reserch", "unknown cohort 'reserch'; did you mean 'research'?"),
    ("{name: institute}", "{name: institute, parent: research}", "is below itself: institute → research → institute"),
    ("{name: institute}", "{name: institute, parent: institute}", "@: cohort 'institute' is below itself"),
    ("parent: institute", "parent: nowhere", "@: unknown cohort 'nowhere'"),
    ("{pool: h100, nominal: 128}", "{pool: h100, nominal: 200}",
     "@: with 'language' 424 of pool 'h100' are guaranteed, which has 384 GPUs"),
    ("{pool: slices, nominal: 56}\n  - name: robotics", "{pool: slices, nominal: 57}\n  - name: robotics",
     "113 of pool 'slices' are guaranteed, which has 112 MIG slices"),
    ("lending_limit: 128", "lending_limit: 193", "@: lending_limit is 193 of 192 nominal"),
    ("{pool: desks, nominal: 64}", "{pool: desks, nominal: 64, borrowing_limit: 8}",
     "borrowing_limit of a team without a cohort"),
    ("{pool: desks, nominal: 64}", "{pool: desk, nominal: 64}", "unknown pool 'desk'; did you mean 'desks'?"),
    ("nominal: 64}", "nominal: -1}", "@: nominal is -1; expected a whole number of 0 or more"),
    ("nominal: 64}", "nominal: 1.5}", "@: nominal is 1.5"), ("nominal: 64}", "nominal: .nan}", "@: nominal is nan"),
    ("profile: 1g.10gb, replicas: 7", "profile: 2g.20gb, replicas: 4", "4 slices 2g.20gb are 8 of the 7 parts"),
    ("profile: 1g.10gb", "profile: 1g.20gb", "and 140 GB of its 80"),
    ("profile: 1g.10gb", "profile: 9g.10gb", "expected a MIG profile"),
    ("{mode: mps, replicas: 8}", "{mode: mps, replicas: 8, profile: 1g.10gb}", "sharing by mps goes with replicas"),
    ("{mode: mps, replicas: 8}", "mps", "sharing by mps goes with replicas"),
    ("{mode: mps, replicas: 8}", "{mode: mp, replicas: 8}", "did you mean 'mps'?"),
    ("{mode: mps, replicas: 8}", "{mode: mps, replicas: 1}", "mps with 1 shares nothing"),
    ("name: vision", "name: kube-system", "@: team 'kube-system' would be a namespace of the system"),
    ("name: vision", "name: 'a; rm -rf /'", "@: name is 'a; rm -rf /'; expected lower-case letters"),
    ("name: vision", "name: language", "team 'language' already exists (line"),
    ("users: [ada, ben]", "users: ['$(id)']", "@: a user is '$(id)'; expected a user's name"),
    ("users: [ada, ben]", "users: ada", "@: users is no list"),
    ("http://alerts.example/vision", "'javascript:1'", "@: webhook is 'javascript:1'; expected an address"),
    ("idle_minutes: 60", "idle_minutes: 999999999",
     "@: idle_minutes is 999999999; expected a whole number of 1 or more, at most 10,080"),
    ("severity: critical", "severity: grave", "unknown severity 'grave'"),
    ("{name: scavenger, value: 0}", "{name: scavenger, value: 0, default: true}", "a second default priority"),
    ("currency: EUR", "currency: €", "@: currency is '€'; expected three letters"),
    ("driver: 580.95.05", "driver: newest", "driver is 'newest'; expected a version"),
    ("{gpu_type: L40S,", "{gpu_type: L4,", "unknown gpu_type 'L4'; did you mean 'L40S'?"),
    ("queueing: StrictFIFO", "queueing: Strict", "unknown queueing 'Strict'"),
    ("  - {name: a100,", "  - {name: a100, count: 1}\n  - {name: a100,", "2 groups are called 'a100'"),
    ("name: slices # each GPU cut", "dra: true\n    name: slices #", "dra is of whole NVIDIA GPUs"),
    ("gpus: 8\n", "gpus: 0\n", "sharing by mig is of NVIDIA's GPUs; this group has none"),
])  # fmt: skip
def test_a_mistake_is_named_with_its_line(tmp_path, old, new, words):
    assert old in EXAMPLE
    path = tmp_path / "cluster.yaml"
    path.write_text(EXAMPLE.replace(old, new, 1))
    line = EXAMPLE[: EXAMPLE.index(old)].count("\n") + 1 + new.rstrip().count("\n")
    with pytest.raises(TraceError, match=re.escape(words.replace("@", f":{line}"))) as raised:
        read(path)
    assert re.search(r"cluster\.yaml:\d+: ", str(raised.value))


def test_the_simulator_takes_the_teams_quotas_from_it():
    found = quota.load(ROOT / "examples/cluster.yaml")
    assert (
        found["vision"].nominal == 256
        and found["vision"].lending_limit == 192
        and found["language"].nominal == 128 + 56 / 7
    )
    assert found["course"].borrowing_limit == 0 == found["course"].lending_limit
