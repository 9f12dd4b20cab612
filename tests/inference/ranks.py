"""Run by torchrun in test_parallel.py: prints what a rank generates."""

import json
import sys

import weft

folder, ranks, device = sys.argv[1], int(sys.argv[2]), sys.argv[3]
llm = weft.LLM(folder, device=device, dtype="fp32", tensor_parallel=ranks, cache_tokens=512, most_sequences=8)
prompts = [list(range(40)), [7, 8, 9], list(range(100, 117))]
p = weft.SamplingParameters
each = [p(max_tokens=12, temperature=0), p(max_tokens=12, temperature=1.0), p(max_tokens=12, seed=3)]
got = [c.token_ids for c in llm.generate(prompts, each)]
sys.stdout.write(json.dumps(got) + "\n")
sys.stdout.flush()
