// [en
// A histogram: bins[v] is how often the byte v is in data. Atomics, privatised in shared memory.
// Launched with any number of blocks of 128 threads; bins is 0 before.
// en]
// [zh
// 直方图：bins[v] 是字节 v 在 data 中出现的次数。原子操作，先在共享内存里各自统计。
// 以任意数量的线程块启动，每块 128 个线程；bins 事先为 0。
// zh]

// TODO(en): An atomic on global memory for every byte is right, and slow: all blocks queue for the same 256 words. Count in a histogram of the
//   block's own in shared memory (set it to 0 first), and add that to bins once at the end, without bins that are 0.
//   Wait between the three parts.
// TODO(zh): 每个字节一次全局内存原子操作，结果正确但很慢：所有线程块都在排队等同样的 256 个字。在线程块自己的共享内存直方图里计数
//   （先置 0），最后一次性加到 bins 上，为 0 的不用加。三个部分之间要等待。
__global__ void histogram(const unsigned char* data, int n, unsigned* bins) {
    // [skeleton
    //: for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[data[i]], 1u);
    // skeleton]
    // [solution
    __shared__ unsigned local[256];
    for (int b = threadIdx.x; b < 256; b += blockDim.x) local[b] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&local[data[i]], 1u);
    __syncthreads();
    for (int b = threadIdx.x; b < 256; b += blockDim.x)
        if (local[b]) atomicAdd(&bins[b], local[b]);
    // solution]
}

// I AM NOT DONE
