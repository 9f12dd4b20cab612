"""Runs of ``weft bench-llm`` in the report."""

import copy

from weft.report import page, serving


def line(**more):
    figures = {
        "requests": 32, "failed": 0, "seconds": 4.0, "requests_per_s": 8.0, "output_tokens_per_s": 512.0, "mean_batch": 7.5,
        "ttft_p50_s": 0.0421, "ttft_p99_s": 0.31, "itl_p50_s": 0.0123, "itl_p99_s": 0.045, "e2e_p50_s": 0.9, "e2e_p99_s": 1.2,
        "throughput_share": 0.41, "ttft_share": 0.2, "itl_share": 0.633, "met_slo": 0.97, "goodput_requests_per_s": 7.76,
    }  # fmt: skip
    load = {"requests": 32, "rate": None, "input_tokens": [128, 128], "output_tokens": [16, 64], "shared": 0, "seed": 0}
    runs = [
        {"load": load, "figures": figures},
        {"load": {**load, "rate": 4.0}, "figures": {**figures, "itl_p50_s": 0.01}},
    ]
    bound = {"weights": 270e6, "token": 23040, "layers": 2e8, "head": 5e7, "bandwidth": 4e12, "matrix": None}
    return {
        "run": "2026-02-01T00:00:00Z", "commit": "abc", "versions": {"torch": "2.13"}, "machine": "Made Up 9000",
        "model": "small", "device": "cuda", "dtype": "bfloat16", "quantize": None, "cache_dtype": "bfloat16",
        "bound": bound, "slo": "ttft=0.5,itl=0.05", "runs": copy.deepcopy(runs),
        "peers": [{"peer": "transformers", "how": "static cache", "seconds": 8.0, "output_tokens_per_s": 256.0}], **more,
    }  # fmt: skip


def test_the_newest_run_of_each_way(tmp_path):
    old = line(run="2026-01-01T00:00:00Z", commit="old")
    remote = {k: v for k, v in line(url="http://h:1/v1", model="far").items() if k not in ("dtype", "device", "bound")}
    broken = line(model="broken", runs=[{"load": line()["runs"][0]["load"], "figures": {"requests": 1, "failed": 1}}])
    lines = [old, line(), remote, broken, {"other": 1}]
    first, second = serving.section(lines)
    longer = line()
    longer["runs"][0]["load"]["input_tokens"] = [512, 512]
    assert [each["load"][15:30] for each in serving.section([line(), longer])] == ["128 + 16…64 tok", "512 + 16…64 tok"]
    assert (first["title"], second["title"]) == (
        "small on Made Up 9000, bfloat16",
        "far on Made Up 9000, http://h:1/v1",
    )
    drafts = serving.section([line(), line(draft="ngram", quantize="int8", bound=None)])
    assert drafts[1]["title"] == "small on Made Up 9000, bfloat16, weights int8, draft ngram" and not drafts[1]["bound"]
    assert len(serving.section([line(), line(draft=None), line(draft="ngram")])) == 2
    assert first["load"] == "32 requests of 128 + 16…64 tokens at each rate" and "commit abc" in first["footnote"]
    head, body = first["table"]
    assert head == ["arrivals a second", "all at once", "4.00"]
    assert ["first token, ms, p50", "42.1", "42.1"] in body and ["between tokens, ms, p50", "12.3", "10.0"] in body
    shares = [row for row in body if row[0] == "  share of the bound"]
    assert [row[1].replace("\u202f", " ") for row in shares] == ["41.0 %", "20.0 %", "63.3 %"]
    assert first["peers"] == ["transformers (static cache), all prompts at once: 256 output tokens/s; weft 2.00×"]
    assert "4.00" in first["bound"] and "not bounded" in first["bound"] and second["bound"] == ""
    assert "all at once: first token 42.1 ms, p99 310 ms" in first["chart"]["description"]
    text = page.render(page.Contents(serving=lines), tmp_path / "index.html").read_text()
    assert 'id="serving"' in text and "small on Made Up 9000" in text and "broken" not in text
    assert 'id="serving"' not in page.render(page.Contents(), tmp_path / "other.html").read_text()
