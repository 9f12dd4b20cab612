// [en
// SAXPY: y = a x + y. Grid, block, thread: which element is mine?
//
// The kernel is launched with ANY number of blocks and threads: more threads than elements, or far fewer.
// en]
// [zh
// SAXPY：y = a x + y。网格、线程块、线程：哪个元素归我？
//
// 核函数可能以*任意*数量的线程块和线程启动：线程可能比元素多，也可能少得多。
// zh]

// TODO(en): Let each thread begin at its own number in the whole grid, and go on by the number of all threads, until n.
// TODO(zh): 让每个线程从它在整个网格中的编号开始，每次前进全部线程的数量，直到 n。
__global__ void saxpy(int n, float a, const float* x, float* y) {
    // [skeleton
    //: int i = threadIdx.x;
    //: y[i] = a * x[i] + y[i];
    // skeleton]
    // [solution
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = a * x[i] + y[i];
    // solution]
}

// I AM NOT DONE
