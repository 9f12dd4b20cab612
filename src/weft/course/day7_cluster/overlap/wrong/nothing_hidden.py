# rejected at: right
# Communication waits for the whole backward pass.
def step(forward_s, layers, bucket_bytes, comm):
    now = forward_s
    link_free = 0.0
    bucket = 0
    for i, (seconds, size) in enumerate(layers):
        now += seconds
        bucket += size
        if bucket and (bucket >= bucket_bytes or i == len(layers) - 1):
            link_free += comm(bucket)
            bucket = 0
    return now + link_free, link_free


def best_bucket(forward_s, layers, sizes, comm):
    return min(sizes, key=lambda size: (step(forward_s, layers, size, comm)[0], -size))
