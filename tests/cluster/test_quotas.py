"""Weights and quotas as they are given: invalid ones, texts and files, the command line, comparisons, pictures."""

import json
import re
from pathlib import Path

import pytest
from schedules import jobs_of

from weft.cluster import Cluster, Simulator, compare, pictures, simulate
from weft.cluster import quota as quotas_of
from weft.cluster.quota import Quota
from weft.cluster.result import REASONS
from weft.definition import UnknownName

TWO = jobs_of(("a", 0, 1, 1), ("b", 0, 1, 1))


@pytest.mark.parametrize(("order", "more", "words"), [
    ("fair-share", {"weights": {"c": 1.0}}, "unknown tenant 'c' (there are: a, b)"),
    ("fair-share", {"weights": {"a": -1.0}}, "the weight of tenant 'a' is -1.0; expected a number above 0"),
    ("drf", {"weights": {"a": float("nan")}}, "the weight of tenant 'a' is nan"),
    ("fifo", {"weights": {"a": 1.0}}, "order 'fifo' uses none; expected one of drf, fair-share"),
    ("fifo", {"quotas": {"c": Quota(1)}}, "unknown tenant 'c'"),
    ("fifo-easy", {"quotas": {"a": Quota(1)}}, "order 'fifo-easy' makes reservations by estimates"),
    *((name, {"quotas": {"a": Quota(1)}}, f"order '{name}' preempts") for name in ("srtf", "time-slices")),
    ("fair-share-easy", {}, "no job can have a reservation; expected 'fair-share' or 'fair-share-skip'"),
    ("drf-conservative", {}, "expected 'drf' or 'drf-skip'"), ("fair-shar", {}, "did you mean 'fair-share'?"),
])  # fmt: skip
def test_invalid_weights_and_quotas_are_refused(order, more, words):
    with pytest.raises(UnknownName if "unknown" in words else ValueError, match=re.escape(words)):
        simulate(TWO, Cluster.parse("1x2"), order, **more)
    if "unknown tenant" not in words:  # the stepping engine meets its tenants later
        with pytest.raises(ValueError, match=re.escape(words)):
            Simulator(order, **more)
    with pytest.raises(ValueError, match=re.escape(words)):
        compare(TWO, Cluster.parse("1x2"), [f"{order}:best"], processes=1, **more)


def test_quota_texts():
    assert quotas_of.parse("team-a=32, team-b=16:8,*=0.5:0") == {
        "team-a": Quota(32), "team-b": Quota(16, 8), "*": Quota(0.5, 0),
    }  # fmt: skip
    assert quotas_of.parse("a=16:8:4,b=16::0") == {"a": Quota(16, 8, 4), "b": Quota(16, lending_limit=0)}
    assert quotas_of.parse_weights("a=2,b=x=0.5") == {"a": 2, "b=x": 0.5}


@pytest.mark.parametrize(("text", "words"), [
    ("a=x", "the quota of tenant 'a' is 'x'; expected GPUs, or GPUs:BORROWED"),
    ("a=1:2:3:4", "the quota of tenant 'a' is '3:4'"), ("a=4:", "the quota of tenant 'a' is ''"),
    ("a=4::5", "tenant 'a': the lending limit is 5.0; expected GPUs, 0 to the nominal quota, 4"),
    ("a=-1", "tenant 'a': the nominal quota is -1.0; expected GPUs, 0 or more"),
    ("a=nan", "tenant 'a': the nominal quota is nan"), ("a=4:-1", "tenant 'a': the borrowing limit is -1.0"),
    ("a=4:nan", "tenant 'a': the borrowing limit is nan"), ("a=4,a=5", "names tenant 'a' twice"),
    ("a=4,", "expected TENANT=…"), ("=4", "expected TENANT=…"), ("no-file.yaml", "quota 'no-file.yaml' is no file"),
])  # fmt: skip
def test_a_malformed_quota_is_refused(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        quotas_of.given(text)


@pytest.mark.parametrize(("text", "line", "words"), [
    ("", "", "it is empty"), ("quotas:\n- tenant: a\n  nominal: [\n", ":4", "no YAML"),
    ("quota:\n- tenant: a\n", ":1", "unknown key 'quota'; did you mean 'quotas'?"),
    ("{}", ":1", "'quotas' is missing"), ("quotas: 5", ":1", "quotas is no list"),
    ("quotas:\n- a\n", ":2", "a quota is a scalar; expected 'key: value' of tenant, nominal"),
    ("quotas:\n- tenant: a\n  nominal: 3\n- tenant: b\n", ":4", "nominal is missing"),
    ("quotas:\n- nominal: 3\n", ":2", "tenant is missing"),
    ("quotas:\n- tenant: a\n  nominal: -3\n", ":3", "nominal is '-3'; expected GPUs, 0 or more"),
    ("quotas:\n- tenant: a\n  nominal: 3\n  borrowing_limit: many\n", ":4", "borrowing_limit is 'many'"),
    ("quotas:\n- tenant: a\n  nominal: 3\n  borowing_limit: 3\n", ":4", "did you mean 'borrowing_limit'?"),
    ("quotas:\n- tenant: a\n  nominal: 3\n- tenant: a\n  nominal: 4\n", ":4", "tenant 'a' already exists"),
    ("quotas:\n- tenant: a\n  nominal: 3\n  lending_limit: 4\n", ":4", "the lending limit is 4.0; expected GPUs, 0 to"),
    ("quotas:\n- tenant: a\n  nominal: 3\n  cpu: {borrowing_limit: 4}\n", ":4", "nominal is missing"),
    ("quotas:\n- tenant: a\n  nominal: 3\n  cpu: many\n", ":4", "nominal is 'many'; expected cores, 0 or more"),
    ("quotas:\n- tenant: [a]\n  nominal: 3\n", ":2", "tenant is no name"),
])  # fmt: skip
def test_a_malformed_quota_file_is_refused_with_its_line(tmp_path, text, line, words):
    pytest.importorskip("yaml")
    path = tmp_path / "quota.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"quota.yaml{line}: ") + ".*" + re.escape(words)):
        quotas_of.given(str(path))


def test_a_quota_file_of_several_resources(write):
    pytest.importorskip("yaml")
    text = (
        "quotas:\n- {tenant: a, nominal: 4, lending_limit: 1, cpu: 32, memory_gb: {nominal: 64, borrowing_limit: 8}}\n"
    )
    assert quotas_of.load(Path(write("q.yaml", text))) == {
        "a": Quota(4, lending_limit=1, cpu=Quota(32), memory_gb=Quota(64, 8))
    }
    with pytest.raises(ValueError, match=r"cpu is 4; expected a Quota of nothing else, such as Quota\(64\)"):
        Quota(4, cpu=4)


@pytest.fixture
def trace(on_nodes):
    """A trace of four jobs on one node, as words of the command."""
    return on_nodes("submit,duration,gpus,tenant\n0,10,4,a\n0,10,4,a\n0,10,4,b\n0,10,4,b\n")


def test_weights_and_quotas_on_the_command_line(weft, trace):
    code, out, _ = weft(*trace, "--order", "fair-share-skip", "--weights", "a=4,b=1", "--quota", "a=4:0,*=4", "--json")
    found = json.loads(out)
    assert code == 0 and found["weights"] == {"a": 4, "b": 1}
    limits = {"borrowing_limit": None, "lending_limit": None}
    assert found["quotas"] == {"a": limits | {"nominal": 4, "borrowing_limit": 0}, "*": limits | {"nominal": 4}}
    assert found["wait_reasons"]["quota"] == 20 == sum(found["wait_reasons"].values())
    assert found["by_tenant"]["a"]["queueing"]["mean"] == 5 and not found["validated"]["order"]
    code, out, _ = weft(*trace, "--order", "fifo", "--quota", "a=8,b=0")
    assert code == 0 and "waited for: quota 100.0%" in out
    code, _, err = weft(*trace, "--order", "fifo", "--quota", "c=8")
    assert code and "unknown tenant 'c'" in err
    code, _, err = weft(*trace, "--order", "drf", "--weights", "a")
    assert code and "weights 'a'; expected TENANT=…, such as team-a=2,team-b=1" in err
    code, _, err = weft(*trace, "--order", "drf", "--weights", "a=0")
    assert code and "the weight of tenant 'a' is 0; expected a number above 0" in err


def test_a_quota_file_on_the_command_line(weft, trace, write):
    pytest.importorskip("yaml")
    quota = write("q.yaml", "quotas:\n- {tenant: a, nominal: 4, borrowing_limit: 0}\n- {tenant: '*', nominal: 4}\n")
    words = ("compare", *trace, "--policy", "fifo-skip:best", "--policy", "fair-share-skip:best", "--weights", "b=9")
    code, out, _ = weft(*words, "--quota", quota, "--processes", 1, "--json")
    every = [each["summary"] for each in json.loads(out)["policies"]]
    assert code == 0 and {each["order"] for each in every} == {"fifo-skip", "fair-share-skip"}
    assert all(each["quotas"]["a"] == {"nominal": 4, "borrowing_limit": 0, "lending_limit": None} for each in every)
    assert [each["weights"] for each in every if each["order"] == "fair-share-skip"] == [{"b": 9}]


def test_policies_of_a_comparison_have_their_tenants_quotas_in_other_processes_too():
    jobs = jobs_of(*((tenant, 0, 10, 4) for tenant in "aaaab"))
    more = {"quotas": {"a": Quota(4, 0), "b": Quota(4)}, "weights": {"a": 2.0}}
    found = compare(jobs, Cluster.parse("1x8"), ["fifo-skip:best", "fair-share:best"], processes=2, keep=True, **more)
    assert [each.value("queueing.mean") for each in found] == [12, 12] and not any(each.failed for each in found)
    assert all(each.runs[0].result.quotas == more["quotas"] for each in found)


def test_the_page_has_a_colour_for_what_a_quota_holds():
    pytest.importorskip("bokeh")
    page = pictures.page([simulate(jobs_of(*[("a", 0, 10, 4)] * 4), Cluster.parse("2x8"), quotas={"a": Quota(4)})])
    assert REASONS["quota"] in page and "◘" in page
