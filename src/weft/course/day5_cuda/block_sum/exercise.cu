// [en
// Divergence: a tree in shared memory whose threads stay together. y[block] is the sum of the block's 256 elements of x.
// Launched with blocks of 256 threads; x has 256 elements for each block.
// en]
// [zh
// 分歧（divergence）：共享内存里的一棵归约树，让干活的线程待在一起。y[block] 是该线程块的 256 个 x 元素之和。
// 以 256 个线程的线程块启动；x 为每个线程块提供 256 个元素。
// zh]

// TODO(en): The tree below is right and slow: in the first round every second thread of each warp works, in the second every fourth. All
//   eight warps go to shared memory in five of the rounds, with ever more idle lanes. Let the first ``stride`` threads add instead, with a
//   stride that begins at 128 and halves, so that whole warps have nothing to do. (Threads side by side on addresses 2 · stride
//   apart would collide in the banks: that is no way out.)
// TODO(zh): 下面这棵树结果正确但很慢：第一轮每个 warp 里隔一个线程干活，第二轮隔三个。有五轮八个 warp 都要访问共享内存，
//   闲着的通道却越来越多。改成由前 ``stride`` 个线程来加，stride 从 128 开始减半，这样会有整个 warp 无事可做。
//   （让相邻的线程去访问相隔 2 · stride 的地址，会在 bank 里冲突：这不是出路。）
__global__ void block_sum(const float* x, float* y) {
    __shared__ float part[256];
    int t = threadIdx.x;
    part[t] = x[blockIdx.x * 256 + t];
    __syncthreads();
    // [skeleton
    //: for (int stride = 1; stride < 256; stride *= 2) {
    //:     if (t % (2 * stride) == 0) part[t] += part[t + stride];
    //:     __syncthreads();
    //: }
    // skeleton]
    // [solution
    for (int stride = 128; stride > 0; stride /= 2) {
        if (t < stride) part[t] += part[t + stride];
        __syncthreads();
    }
    // solution]
    if (t == 0) y[blockIdx.x] = part[0];
}

// I AM NOT DONE
