/* A fake libnvidia-ml.so.1: GPUs as a control file describes them, which may be rewritten while a program runs.
 *
 * The file's path is in FAKE_NVML; each line is one of (GPU is an index, or -1 for all; FUNCTION a name, or *):
 *   gpus N
 *   set GPU NAME VALUE          the value of a reading (names: see value() below)
 *   mig GPU PROFILE SM MIB      one more MIG device on that GPU
 *   process GPU PID MIB INSTANCE    a compute process; INSTANCE is a MIG device's place or -1
 *   error FUNCTION GPU CODE     that call returns CODE
 *   hang FUNCTION GPU           that call does not return while the line is there
 *   crash FUNCTION GPU          that call ends the process with SIGSEGV
 *   xid GPU CODE                an event, delivered once to each event set made before the line was written
 *
 * Layouts are nvml.h's, as nvidia-ml-py declares them.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MOST 4096
#define NAME 64
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, TIMEOUT = 10, LOST = 15 };

typedef void *device;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { char old[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
typedef struct { unsigned sm, rest[7]; unsigned long long mib; } attributes;
typedef struct { device d; unsigned long long type, data; unsigned instance, compute; } event;
typedef struct { int gpu; char name[NAME]; double value; } setting;
typedef struct { char function[NAME]; int gpu, code; } rule; /* code: the error; -1 hangs, -2 crashes */
typedef struct { int gpu, sm, mib; char profile[NAME]; } mig;
typedef struct { int gpu, pid, mib, instance; } process;

typedef struct {
    int gpus, settings, rules, migs, processes, xids;
    setting setting[MOST];
    rule rule[MOST];
    mig mig[MOST];
    process process[MOST];
    struct { int gpu, code; } xid[MOST];
} state;
static state nothing, *now = &nothing; /* replaced as a whole, since calls come from several threads */
static struct stat seen;
static pthread_mutex_t reloading = PTHREAD_MUTEX_INITIALIZER;

static void read_file(const char *path) {
    FILE *file = fopen(path, "r");
    char line[256], text[NAME];
    int a, b, c, d;
    double x;
    if (!file) return;
    state *next = calloc(1, sizeof *next);
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "gpus %d", &a) == 1) next->gpus = a;
        else if (sscanf(line, "set %d %63s %lf", &a, text, &x) == 3 && next->settings < MOST) {
            setting *s = &next->setting[next->settings++];
            s->gpu = a, s->value = x, strcpy(s->name, text);
        } else if (sscanf(line, "mig %d %63s %d %d", &a, text, &b, &c) == 4 && next->migs < MOST) {
            mig *m = &next->mig[next->migs++];
            m->gpu = a, m->sm = b, m->mib = c, strcpy(m->profile, text);
        } else if (sscanf(line, "process %d %d %d %d", &a, &b, &c, &d) == 4 && next->processes < MOST)
            next->process[next->processes++] = (process){a, b, c, d};
        else if (sscanf(line, "xid %d %d", &a, &b) == 2 && next->xids < MOST)
            next->xid[next->xids].gpu = a, next->xid[next->xids++].code = b;
        else if (next->rules < MOST) {
            rule *r = &next->rule[next->rules];
            if (sscanf(line, "error %63s %d %d", r->function, &r->gpu, &r->code) == 3) next->rules++;
            else if (sscanf(line, "hang %63s %d", r->function, &r->gpu) == 2) r->code = -1, next->rules++;
            else if (sscanf(line, "crash %63s %d", r->function, &r->gpu) == 2) r->code = -2, next->rules++;
        }
    }
    fclose(file);
    now = next; /* the old one is not freed: another thread may read it */
}

static void reload(void) {
    const char *path = getenv("FAKE_NVML");
    struct stat st;
    if (!path || stat(path, &st)) return;
    pthread_mutex_lock(&reloading);
    if (st.st_ino != seen.st_ino || st.st_size != seen.st_size || st.st_mtim.tv_nsec != seen.st_mtim.tv_nsec) {
        read_file(path);
        seen = st;
    }
    pthread_mutex_unlock(&reloading);
}

static int verdict(const char *function, int gpu) {
    reload();
    for (int i = 0; i < now->rules; i++) {
        rule *r = &now->rule[i];
        if (strcmp(r->function, "*") && strcmp(r->function, function)) continue;
        if (r->gpu == -1 || gpu == r->gpu) return r->code;
    }
    return OK;
}

static int check(const char *function, int gpu) {
    int code;
    while ((code = verdict(function, gpu)) == -1) usleep(20000);
    if (code == -2) *(volatile int *)0 = 1;
    return code;
}

/* handles: 1 + GPU, and 1000 + 1 + the place of a MIG device */
static int is_mig(device d) { return (intptr_t)d > 1000; }
static mig *mig_of(device d) { return &now->mig[(intptr_t)d - 1001]; }
static int gpu_of(device d) { return is_mig(d) ? mig_of(d)->gpu : (int)(intptr_t)d - 1; }
static int place(device d) { /* of a MIG device among its GPU's */
    int n = 0;
    for (int i = 0; i < (int)((intptr_t)d - 1001); i++) n += now->mig[i].gpu == mig_of(d)->gpu;
    return n;
}

static double value(device d, const char *name, double otherwise) {
    int gpu = gpu_of(d);
    for (int i = now->settings - 1; i >= 0; i--)
        if ((now->setting[i].gpu == gpu || now->setting[i].gpu == -1) && !strcmp(now->setting[i].name, name))
            return now->setting[i].value;
    return otherwise;
}

#define ENTER(d) do { int code_ = check(__func__, gpu_of(d)); if (code_) return code_; } while (0)
#define GPU_ONLY(d) do { ENTER(d); if (is_mig(d)) return NOT_SUPPORTED; } while (0)
#define READING(function, type, expression) \
    int function(device d, type *out) { GPU_ONLY(d); *out = (type)(expression); return OK; }

int nvmlInitWithFlags(unsigned flags) { (void)flags; return check(__func__, -2); }
int nvmlInit_v2(void) { return check(__func__, -2); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the fake NVML"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    int code = check(__func__, -2);
    return code ? code : (snprintf(out, size, "580.65.06"), OK);
}
int nvmlSystemGetCudaDriverVersion(int *out) { int code = check(__func__, -2); *out = 13000; return code; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { int code = check(__func__, -2); *out = 13000; return code; }

int nvmlDeviceGetCount_v2(unsigned *out) { int code = check(__func__, -2); *out = now->gpus; return code; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *out) {
    int code = check(__func__, index);
    if (code) return code;
    if ((int)index >= now->gpus) return INVALID;
    *out = (device)(intptr_t)(index + 1);
    return OK;
}
int nvmlDeviceGetName(device d, char *out, unsigned size) {
    ENTER(d);
    if (is_mig(d)) snprintf(out, size, "NVIDIA H100 80GB HBM3 MIG %s", mig_of(d)->profile);
    else snprintf(out, size, "NVIDIA H100 80GB HBM3");
    return OK;
}
int nvmlDeviceGetUUID(device d, char *out, unsigned size) {
    ENTER(d);
    if (is_mig(d)) snprintf(out, size, "MIG-00000000-0000-0000-%04d-%012d", gpu_of(d), place(d));
    else snprintf(out, size, "GPU-00000000-0000-0000-0000-%012d", gpu_of(d));
    return OK;
}
READING(nvmlDeviceGetMinorNumber, unsigned, gpu_of(d))
READING(nvmlDeviceGetArchitecture, unsigned, 9)
READING(nvmlDeviceGetMemoryBusWidth, unsigned, 5120)
READING(nvmlDeviceGetNumGpuCores, unsigned, 16896)
READING(nvmlDeviceGetPowerUsage, unsigned, value(d, "power_mw", 100000 + 1000 * gpu_of(d)))
READING(nvmlDeviceGetEnforcedPowerLimit, unsigned, value(d, "power_limit_mw", 700000))
READING(nvmlDeviceGetPcieReplayCounter, unsigned, value(d, "pcie_replays", gpu_of(d)))
READING(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, value(d, "throttle", 1))
READING(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, value(d, "throttle", 1))
READING(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, value(d, "energy_mj", 1e9 + gpu_of(d)))
READING(nvmlDeviceGetMaxMigDeviceCount, unsigned, 7)
READING(nvmlDeviceGetComputeMode, unsigned, 0)
READING(nvmlDeviceGetPersistenceMode, unsigned, 1)
READING(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, 4)
READING(nvmlDeviceGetCurrPcieLinkWidth, unsigned, 16)
READING(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 5)
READING(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
READING(nvmlDeviceGetSupportedEventTypes, unsigned long long, 8)

int nvmlDeviceGetCudaComputeCapability(device d, int *major, int *minor) { GPU_ONLY(d); *major = 9, *minor = 0; return OK; }
int nvmlDeviceGetSerial(device d, char *out, unsigned size) { GPU_ONLY(d); snprintf(out, size, "16500%d", gpu_of(d)); return OK; }
int nvmlDeviceGetVbiosVersion(device d, char *out, unsigned size) { GPU_ONLY(d); snprintf(out, size, "96.00.74.00.1A"); return OK; }
int nvmlDeviceGetTemperature(device d, int sensor, unsigned *out) {
    (void)sensor;
    GPU_ONLY(d);
    *out = value(d, "temperature_c", 40 + gpu_of(d));
    return OK;
}
int nvmlDeviceGetTemperatureThreshold(device d, int which, unsigned *out) {
    static const unsigned at[] = {92, 89, 95, 87};
    GPU_ONLY(d);
    if (which > 3) return NOT_SUPPORTED;
    *out = at[which];
    return OK;
}
int nvmlDeviceGetClockInfo(device d, int which, unsigned *out) {
    GPU_ONLY(d);
    *out = which == 2 ? value(d, "memory_clock_mhz", 2619) : value(d, "sm_clock_mhz", 1500 + gpu_of(d));
    return OK;
}
int nvmlDeviceGetMaxClockInfo(device d, int which, unsigned *out) { GPU_ONLY(d); *out = which == 2 ? 2619 : 1980; return OK; }
int nvmlDeviceGetEccMode(device d, unsigned *current, unsigned *pending) { GPU_ONLY(d); *current = *pending = 1; return OK; }
int nvmlDeviceGetTotalEccErrors(device d, int kind, int counter, unsigned long long *out) {
    static const char *const names[2][2] = {{"ecc_corrected", "ecc_corrected_ever"}, {"ecc_uncorrected", "ecc_uncorrected_ever"}};
    GPU_ONLY(d);
    *out = value(d, names[kind & 1][counter & 1], 0);
    return OK;
}
int nvmlDeviceGetRemappedRows(device d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    GPU_ONLY(d);
    *corrected = value(d, "rows_corrected", 0), *uncorrected = value(d, "rows_uncorrected", 0);
    *pending = value(d, "rows_pending", 0), *failed = value(d, "rows_failed", 0);
    return OK;
}
int nvmlDeviceGetUtilizationRates(device d, unsigned out[2]) {
    GPU_ONLY(d);
    out[0] = value(d, "gpu_util", 10 * gpu_of(d)), out[1] = value(d, "memory_util", 5 * gpu_of(d));
    return OK;
}
int nvmlDeviceGetEncoderUtilization(device d, unsigned *out, unsigned *us) { GPU_ONLY(d); *out = 0, *us = 1000; return OK; }
int nvmlDeviceGetDecoderUtilization(device d, unsigned *out, unsigned *us) { GPU_ONLY(d); *out = 0, *us = 1000; return OK; }

static unsigned long long total_of(device d) { return (unsigned long long)(is_mig(d) ? mig_of(d)->mib : 81920) << 20; }
static unsigned long long used_of(device d) {
    unsigned long long sum = 0;
    for (int i = 0; i < now->processes; i++)
        if (now->process[i].gpu == gpu_of(d) && (!is_mig(d) || now->process[i].instance == place(d)))
            sum += (unsigned long long)now->process[i].mib << 20;
    return sum;
}
int nvmlDeviceGetMemoryInfo(device d, unsigned long long out[3]) {
    ENTER(d);
    out[0] = total_of(d), out[2] = used_of(d), out[1] = out[0] - out[2];
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(device d, memory_v2 *out) {
    ENTER(d);
    out->total = total_of(d), out->reserved = is_mig(d) ? 0 : 512ull << 20, out->used = used_of(d);
    out->free = out->total - out->reserved - out->used;
    return OK;
}
int nvmlDeviceGetPciInfo_v3(device d, pci_info *out) {
    GPU_ONLY(d);
    memset(out, 0, sizeof *out);
    out->bus = 0x10 + gpu_of(d), out->id = 0x233010DE;
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    return OK;
}

typedef struct { unsigned pid; unsigned long long used; unsigned instance, compute; } process_info;
static int processes(device d, unsigned *count, process_info *out) {
    unsigned found = 0, room = *count;
    for (int i = 0; i < now->processes; i++) {
        process *p = &now->process[i];
        if (p->gpu != gpu_of(d) || (is_mig(d) && p->instance != place(d))) continue;
        if (found < room && out)
            out[found] = (process_info){p->pid, (unsigned long long)p->mib << 20, p->instance, p->instance < 0 ? -1 : 0};
        found++;
    }
    *count = found;
    return found > room || (found && !out) ? SMALL : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *count, process_info *out) { ENTER(d); return processes(d, count, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(device d, unsigned *count, process_info *out) {
    (void)out;
    ENTER(d);
    *count = 0;
    return OK;
}
typedef struct { unsigned pid; unsigned long long time; unsigned sm, memory, encoder, decoder; } use;
int nvmlDeviceGetProcessUtilization(device d, use *out, unsigned *count, unsigned long long since) {
    unsigned found = 0, room = *count;
    (void)since;
    GPU_ONLY(d);
    for (int i = 0; i < now->processes; i++) {
        if (now->process[i].gpu != gpu_of(d)) continue;
        if (out && found < room) out[found] = (use){now->process[i].pid, 1, 7, 3, 0, 0};
        found++;
    }
    *count = found;
    return found > room || !out ? SMALL : OK;
}

int nvmlDeviceGetMigMode(device d, unsigned *current, unsigned *pending) {
    GPU_ONLY(d);
    *current = 0;
    for (int i = 0; i < now->migs; i++) *current |= now->mig[i].gpu == gpu_of(d);
    *pending = *current;
    return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(device d, unsigned index, device *out) {
    GPU_ONLY(d);
    for (int i = 0; i < now->migs; i++)
        if (now->mig[i].gpu == gpu_of(d) && !index--) return *out = (device)(intptr_t)(1001 + i), OK;
    return NOT_FOUND;
}
int nvmlDeviceGetGpuInstanceId(device d, unsigned *out) { ENTER(d); if (!is_mig(d)) return NOT_SUPPORTED; *out = place(d); return OK; }
int nvmlDeviceGetComputeInstanceId(device d, unsigned *out) { ENTER(d); if (!is_mig(d)) return NOT_SUPPORTED; *out = 0; return OK; }
int nvmlDeviceGetAttributes_v2(device d, attributes *out) {
    ENTER(d);
    if (!is_mig(d)) return NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    out->sm = mig_of(d)->sm, out->mib = mig_of(d)->mib;
    return OK;
}

typedef struct { unsigned id, scope; long long time, latency; unsigned type; int code; unsigned long long value; } field_value;
int nvmlDeviceGetFieldValues(device d, int count, field_value *out) {
    static const struct { unsigned id; const char *name; } known[] = {
        {82, "memory_temperature_c"}, {197, "pcie_tx_bytes"}, {198, "pcie_rx_bytes"}, {138, "nvlink_tx_kib"},
        {139, "nvlink_rx_kib"}, {38, "nvlink_crc_flit"}, {45, "nvlink_crc_data"}, {52, "nvlink_replay"},
        {59, "nvlink_recovery"}, {74, "throttled_power_ns"}, {75, "throttled_thermal_ns"}, {230, "recovery_action"},
    };
    GPU_ONLY(d);
    for (int i = 0; i < count; i++) {
        out[i].code = NOT_SUPPORTED, out[i].type = 3;
        for (unsigned k = 0; k < sizeof known / sizeof *known; k++)
            if (known[k].id == out[i].id) out[i].code = OK, out[i].value = value(d, known[k].name, k ? 0 : 45);
    }
    return OK;
}
int nvmlDeviceGetNvLinkState(device d, unsigned link, unsigned *out) { GPU_ONLY(d); if (link >= 18) return INVALID; *out = 1; return OK; }

/* GPM: the difference of two samples; a sample is only a note of which device it is of */
typedef struct { unsigned id; int code; double value; void *info[3]; } gpm_metric;
typedef struct { unsigned version, count; intptr_t *first, *second; gpm_metric metric[]; } gpm_get;
int nvmlGpmQueryDeviceSupport(device d, unsigned out[2]) { GPU_ONLY(d); out[1] = value(d, "gpm", 1); return OK; }
int nvmlGpmSampleAlloc(intptr_t **out) { return *out = calloc(1, sizeof **out), OK; }
int nvmlGpmSampleFree(intptr_t *sample) { return free(sample), OK; }
int nvmlGpmSampleGet(device d, intptr_t *sample) { GPU_ONLY(d); *sample = (intptr_t)d; return OK; }
int nvmlGpmMigSampleGet(device d, unsigned instance, intptr_t *sample) { GPU_ONLY(d); (void)instance; *sample = (intptr_t)d; return OK; }
int nvmlGpmMetricsGet(gpm_get *out) {
    device d = (device)*out->first;
    ENTER(d);
    for (unsigned i = 0; i < out->count; i++) {
        gpm_metric *m = &out->metric[i];
        m->code = OK, m->value = value(d, m->id == 5 ? "tensor" : m->id == 1 ? "graphics" : "other", 10.0 * m->id);
    }
    return OK;
}

/* events: a set is how many xid lines were delivered; FAKE_NVML.events is made with the first */
int nvmlEventSetCreate(int **out) {
    int code = check(__func__, -2);
    char path[4096];
    *out = malloc(sizeof **out), **out = now->xids;
    snprintf(path, sizeof path, "%s.events", getenv("FAKE_NVML"));
    FILE *mark = fopen(path, "w");
    if (mark) fclose(mark);
    return code;
}
int nvmlEventSetFree(int *set) { return free(set), OK; }
int nvmlDeviceRegisterEvents(device d, unsigned long long kinds, int *set) { GPU_ONLY(d); (void)kinds, (void)set; return OK; }
int nvmlEventSetWait_v2(int *set, event *out, unsigned ms) {
    for (unsigned waited = 0;; waited += 10) {
        int code = check(__func__, -2);
        if (code) return code;
        if (*set > now->xids) *set = now->xids; /* the file was begun anew */
        if (*set < now->xids) {
            memset(out, 0, sizeof *out);
            out->d = (device)(intptr_t)(now->xid[*set].gpu + 1), out->type = 8, out->data = now->xid[*set].code;
            ++*set;
            return OK;
        }
        if (waited >= ms) return TIMEOUT;
        usleep(10000);
    }
}
