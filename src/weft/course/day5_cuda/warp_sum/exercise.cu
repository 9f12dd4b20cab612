// [en
// The sum of each row by one warp, with shuffles: y[row] is the sum of x[row, 0 … N-1].
//
// Launched with blocks of 128 threads, four warps, and enough blocks for one warp a row; M need not be divisible by four.
// en]
// [zh
// 用 shuffle 让一个 warp 求一行之和：y[row] 是 x[row, 0 … N-1] 的和。
//
// 以 128 个线程（四个 warp）的线程块启动，线程块的数量足够每行一个 warp；M 不一定能被四整除。
// zh]

// TODO(en): Each lane adds every 32nd element of its warp's row. Then the 32 partial sums are added in five steps:
//   __shfl_down_sync(0xffffffff, value, offset) gives the value of the lane that is ``offset`` further. Lane 0 writes the result.
//   No shared memory, no atomics; all 32 lanes must take part in every shuffle.
// TODO(zh): 每个通道累加本 warp 那一行里每隔 32 个的元素。然后用五步把 32 个部分和相加：
//   __shfl_down_sync(0xffffffff, value, offset) 得到往后 ``offset`` 个通道的值。由通道 0 写出结果。
//   不用共享内存，不用原子操作；每次 shuffle 全部 32 个通道都要参与。
__global__ void row_sums(const float* x, float* y, int M, int N) {
    // [skeleton
    //: int row = blockIdx.x * 4 + threadIdx.x / 32;
    //: for (int i = threadIdx.x % 32; row < M && i < N; i += 32) atomicAdd(&y[row], x[row * N + i]);
    // skeleton]
    // [solution
    int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= M) return;  // whole warps
    float sum = 0.f;
    for (int i = lane; i < N; i += 32) sum += x[row * N + i];
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    if (lane == 0) y[row] = sum;
    // solution]
}

// I AM NOT DONE
