# rejected at: right
# The last bucket is not sent unless it is full.
def step(forward_s, layers, bucket_bytes, comm):
    now = forward_s
    link_free = 0.0
    bucket = 0
    for seconds, size in layers:
        now += seconds
        bucket += size
        if bucket and (bucket >= bucket_bytes):
            link_free = max(link_free, now) + comm(bucket)
            bucket = 0
    return max(now, link_free), max(0.0, link_free - now)


def best_bucket(forward_s, layers, sizes, comm):
    return min(sizes, key=lambda size: (step(forward_s, layers, size, comm)[0], -size))
