// [en
// Constant memory: 64 KB with a cache of its own that gives a warp one word at a time. Lanes that read the same word get it in one pass;
// lanes that read 32 different words wait for 32 passes.
//
// y[i] = taps[0] · curve[data[i]] + taps[1] · curve[data[i + 1]] + … + taps[8] · curve[data[i + 8]]: a filter over bytes, each of which
// stands for a value on a curve. Launched with blocks of 256 threads, as many as n results need; data has n + 8 bytes. The host fills
// both arrays before the launch: cudaMemcpyToSymbol(taps, host, sizeof(taps)).
// en]
// [zh
// 常量内存（constant memory）：64 KB，有自己的缓存，每次给一个 warp 一个字。各通道读同一个字，一趟就够；读 32 个不同的字，就要 32 趟。
//
// y[i] = taps[0] · curve[data[i]] + taps[1] · curve[data[i + 1]] + … + taps[8] · curve[data[i + 8]]：对字节做滤波，每个字节代表曲线上的
// 一个值。每个线程块 256 个线程，线程块数按 n 个结果的需要；data 有 n + 8 个字节。两个数组都由主机在启动之前填好：
// cudaMemcpyToSymbol(taps, host, sizeof(taps))。
// zh]

__constant__ float taps[9];
__constant__ float curve[256];

// TODO(en): The kernel below is right. All lanes read taps[k] together; but curve[…] depends on the data, and takes up to 32 passes each time.
//   A table that is looked up by data belongs into shared memory: copy curve there once a block, one word a thread, wait, and look it up
//   there. Leave taps where it is. Mind the threads beyond n: they copy too.
// TODO(zh): 下面的核函数结果正确。taps[k] 是所有通道一起读的；而 curve[…] 取决于数据，每次最多要 32 趟。按数据查的表应当放在共享内存里：
//   每个线程块把 curve 拷过去一次，每个线程一个字，等待，然后在那里查。taps 留在原处。注意超出 n 的线程：它们也要参与拷贝。
__global__ void filter(const unsigned char* data, float* y, int n) {
    int i = blockIdx.x * 256 + threadIdx.x;
    // [skeleton
    //: if (i >= n) return;
    //: float sum = 0.0f;
    //: for (int k = 0; k < 9; k++) sum += taps[k] * curve[data[i + k]];
    //: y[i] = sum;
    // skeleton]
    // [solution
    __shared__ float table[256];
    table[threadIdx.x] = curve[threadIdx.x];
    __syncthreads();
    if (i >= n) return;
    float sum = 0.0f;
    for (int k = 0; k < 9; k++) sum += taps[k] * table[data[i + k]];
    y[i] = sum;
    // solution]
}

// I AM NOT DONE
