// [en
// Transpose through shared memory: y [N, M] is the transpose of x [M, N].
//
// Launched with blocks of (32, 8) threads; block (bx, by) has the tile of 32 × 32 that begins at row 32 by, column 32 bx of x.
// en]
// [zh
// 经由共享内存的转置：y [N, M] 是 x [M, N] 的转置。
//
// 以 (32, 8) 个线程的线程块启动；线程块 (bx, by) 负责 x 中从第 32 by 行、第 32 bx 列开始的 32 × 32 的块。
// zh]

// TODO(en): Reading rows of x and writing them as columns of y scatters the writes. Load the tile into shared memory by rows, wait for
//   all threads, and write it by rows of y, so that a warp both reads and writes 32 neighbours. Each thread has four rows: threadIdx.y,
//   + 8, + 16, + 24. Guard the edges, and lay the tile out so that reading its columns has no bank conflicts.
// TODO(zh): 按行读 x、按列写 y，会让写入分散。把块按行装进共享内存，等所有线程到齐，再按 y 的行写出，这样一个 warp 读和写的都是 32 个相邻元素。
//   每个线程负责四行：threadIdx.y、+ 8、+ 16、+ 24。注意边界，并安排好块的布局，使按列读没有 bank 冲突。
__global__ void transpose(const float* x, float* y, int M, int N) {
    // [skeleton
    //: int column = blockIdx.x * 32 + threadIdx.x;
    //: for (int j = threadIdx.y; j < 32; j += 8) {
    //:     int row = blockIdx.y * 32 + j;
    //:     if (row < M && column < N) y[column * M + row] = x[row * N + column];
    //: }
    // skeleton]
    // [solution
    __shared__ float tile[32][33];  // 33: the elements of a column lie in 32 different banks
    int column = blockIdx.x * 32 + threadIdx.x;
    for (int j = threadIdx.y; j < 32; j += 8) {
        int row = blockIdx.y * 32 + j;
        if (row < M && column < N) tile[j][threadIdx.x] = x[row * N + column];
    }
    __syncthreads();
    int to = blockIdx.y * 32 + threadIdx.x;  // a row of x is a column of y
    for (int j = threadIdx.y; j < 32; j += 8) {
        int row = blockIdx.x * 32 + j;
        if (row < N && to < M) y[row * M + to] = tile[threadIdx.x][j];
    }
    // solution]
}

// I AM NOT DONE
