"""A cluster file of 1,000 nodes and 200 teams."""


def text(nodes: int = 1000, teams: int = 200) -> str:
    lines = ["name: big", "nodes:"]
    pools = 4
    for p in range(pools):
        lines.append(
            f"  - {{name: pool{p}, count: {nodes // pools}, gpus: 8, gpu_type: H{p}, cpu: 192, memory_gb: 2000, rack_nodes: 8}}"
        )
    lines += ["cohorts:", "  - {name: all}", *(f"  - {{name: c{k}, parent: all}}" for k in range(10)), "teams:"]
    for t in range(teams):
        quota = ", ".join(
            f"{{pool: pool{p}, nominal: {nodes * 8 // pools // teams}, borrowing_limit: 32}}" for p in range(pools)
        )
        lines.append(
            f"  - {{name: t{t:03d}, cohort: c{t % 10}, users: [u{t}, v{t}], webhook: 'http://a.example/{t}', quota: [{quota}]}}"
        )
    lines += [
        "priorities:",
        "  - {name: high, value: 10, default: true}",
        "slurm: {controller: head, accounting: head}",
    ]
    return "\n".join(lines) + "\n"
