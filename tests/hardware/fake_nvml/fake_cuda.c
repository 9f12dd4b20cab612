/* A fake libcuda.so.1: one GPU, with FAKE_CUDA_INIT as the result of cuInit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuInit(unsigned flags) { const char *code = getenv("FAKE_CUDA_INIT"); (void)flags; return code ? atoi(code) : 0; }
int cuDriverGetVersion(int *out) { *out = 13000; return 0; }
int cuDeviceGetCount(int *out) { *out = 1; return 0; }
int cuDeviceGet(int *out, int index) { *out = index; return 0; }
int cuDeviceGetName(char *out, int size, int device) { snprintf(out, size, "NVIDIA H100 80GB HBM3"); return device; }
int cuDeviceTotalMem_v2(size_t *out, int device) { *out = 79ull << 30; return device; }
int cuDeviceGetPCIBusId(char *out, int size, int device) { snprintf(out, size, "0000:10:00.0"); return device; }
int cuDeviceGetUuid(char *out, int device) { memset(out, 7, 16); return device; }
int cuDeviceGetAttribute(int *out, int attribute, int device) {
    static const struct { int attribute, value; } known[] = {
        {1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152}, {9, 65536}, {10, 32},
        {12, 65536}, {13, 1980000}, {16, 132}, {17, 0}, {18, 0}, {20, 3}, {32, 1}, {36, 2619000}, {37, 5120}, {38, 52428800},
        {39, 2048}, {75, 9}, {76, 0}, {81, 233472}, {82, 65536}, {97, 232448}, {106, 32}, {120, 1},
    };
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == attribute) return *out = known[i].value, device;
    return 1; /* CUDA_ERROR_INVALID_VALUE */
}
