// A stand-in for NCCL, for ranks that are threads or processes of one machine: each message is a file in the folder that the
// unique id names. A rank that is gone is noticed by nobody, as between GPUs of one machine. Nothing blocks the caller but to
// destroy or abort a communicator: as NCCL's proxies, which serve the other ranks of a machine, that waits until every one of
// these has come to the same point, or its process is gone. One that stands still is waited for.
//
// STAND_IN_NCCL=KIND:RANK:GROUP    a fault in a rank's GROUP-th group of calls, from 1:
//     hang      it never ends, until it is aborted
//     error     it never ends, and the communicator has failed
//     late      the communicator fails a moment after its end
//     refuse    the call is refused
//     meet      (GROUP 0) the rank never comes to meet the others
#define _GNU_SOURCE
#include "stand_in.h"
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS, UNHANDLED_CUDA, SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, IN_PROGRESS };
enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16 };
enum { SUM, PROD, MAX, MIN, AVG };
enum kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECV };

typedef struct { char internal[128]; } unique_id;
struct config { size_t size; unsigned magic, version; int blocking, cga, min_ctas, max_ctas; const char *net; int split_share; };

struct comm {
    char folder[100];
    int rank, world, device;
    // All of these under the mutex.
    pthread_mutex_t mutex;
    int state, aborted, busy, closed, met;
    unsigned groups;
    // A file that is locked until this rank leaves, or its process is gone.
    int presence;
    // Touched by the stream's work alone.
    uint64_t *sent, *received;
};

// What is said before a message's elements; both ends must mean the same.
struct head { int kind, dtype, op, root; uint64_t count; };
struct call { struct head head; const char *from; char *into; int peer; };
struct group { struct comm *comm; void *stream; int fault, count; struct call *calls; struct group *next; };

static __thread char last_error[256];
static int wrong(int code, const char *text) {
    snprintf(last_error, sizeof last_error, "stand-in: %s", text);
    return code;
}

extern int cuCtxGetCurrent(void **);
static int current_device(void) {
    int *context = NULL;
    cuCtxGetCurrent((void **)&context);
    return context ? *context : -1;
}

static int is_aborted(struct comm *comm) {
    pthread_mutex_lock(&comm->mutex);
    int aborted = comm->aborted;
    pthread_mutex_unlock(&comm->mutex);
    return aborted;
}
static void set_state(struct comm *comm, int state) {
    pthread_mutex_lock(&comm->mutex);
    if (comm->state == SUCCESS || comm->state == IN_PROGRESS) comm->state = state;
    pthread_mutex_unlock(&comm->mutex);
}
static void nap(unsigned *looks) { usleep(*looks < 50 ? (*looks)++, 10 : 200); }

// Faults

static int fault(const char *kind, int rank, unsigned group) {
    char wanted[64];
    const char *given = getenv("STAND_IN_NCCL");
    snprintf(wanted, sizeof wanted, "%s:%d:%u", kind, rank, group);
    return given && !strcmp(given, wanted);
}

// Messages

static void name_of(const struct comm *comm, char *to, int from, int into, uint64_t number, const char *end) {
    snprintf(to, PATH_MAX, "%s/%d-%d-%lu%s", comm->folder, from, into, (unsigned long)number, end);
}
static int post(struct comm *comm, int to, const struct head *head, const char *elements, size_t bytes) {
    char name[PATH_MAX], ready[PATH_MAX];
    uint64_t number = comm->sent[to]++;
    name_of(comm, name, comm->rank, to, number, ".part");
    name_of(comm, ready, comm->rank, to, number, "");
    int file = open(name, O_CREAT | O_WRONLY | O_EXCL, 0600);
    int bad = file < 0 || write(file, head, sizeof *head) != sizeof *head;
    for (size_t done = 0; !bad && done < bytes;) {
        ssize_t wrote = write(file, elements + done, bytes - done);
        bad = wrote <= 0;
        done += bad ? 0 : (size_t)wrote;
    }
    if (file >= 0) close(file);
    return bad || rename(name, ready) ? SYSTEM : SUCCESS;
}
static int take(struct comm *comm, int from, const struct head *head, char *elements, size_t bytes) {
    char name[PATH_MAX];
    struct head theirs;
    unsigned looks = 0;
    int file;
    name_of(comm, name, from, comm->rank, comm->received[from]++, "");
    while ((file = open(name, O_RDONLY)) < 0) {
        if (is_aborted(comm)) return IN_PROGRESS;
        nap(&looks);
    }
    int bad = read(file, &theirs, sizeof theirs) != sizeof theirs || memcmp(&theirs, head, sizeof theirs);
    for (size_t done = 0; !bad && done < bytes;) {
        ssize_t got = read(file, elements + done, bytes - done);
        bad = got <= 0;
        done += bad ? 0 : (size_t)got;
    }
    close(file);
    unlink(name);
    if (bad) fprintf(stderr, "stand-in: rank %d expects another call than rank %d has made\n", comm->rank, from);
    return bad ? INTERNAL : SUCCESS;
}
// As on a GPU, what was sent is gone only when it was received.
static void wait_taken(struct comm *comm, int to) {
    char name[PATH_MAX];
    unsigned looks = 0;
    if (!comm->sent[to]) return;
    name_of(comm, name, comm->rank, to, comm->sent[to] - 1, "");
    while (!access(name, F_OK) && !is_aborted(comm)) nap(&looks);
}

// Arithmetic

static size_t size_of(int dtype) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return sizes[dtype];
}
static float widen(int dtype, uint16_t bits) {
    if (dtype == F16) { _Float16 half; memcpy(&half, &bits, 2); return (float)half; }
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
static uint16_t narrow(int dtype, float value) {
    uint16_t bits;
    if (dtype == F16) { _Float16 half = (_Float16)value; memcpy(&bits, &half, 2); return bits; }
    uint32_t wide;
    memcpy(&wide, &value, 4);
    return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}
#define APPLY(a, b) (op == PROD ? (a) * (b) : op == MAX ? ((b) > (a) ? (b) : (a)) : op == MIN ? ((b) < (a) ? (b) : (a)) : (a) + (b))
#define EACH(type) { type *x = (type *)into; const type *y = (const type *)with; for (size_t i = 0; i < count; i++) x[i] = (type)APPLY(x[i], y[i]); break; }
static void reduce(char *into, const char *with, size_t count, int dtype, int op) {
    switch (dtype) {
        case I8: EACH(int8_t) case U8: EACH(uint8_t) case I32: EACH(int32_t) case U32: EACH(uint32_t)
        case I64: EACH(int64_t) case U64: EACH(uint64_t) case F32: EACH(float) case F64: EACH(double)
        default: {
            uint16_t *x = (uint16_t *)into;
            const uint16_t *y = (const uint16_t *)with;
            for (size_t i = 0; i < count; i++) {
                float a = widen(dtype, x[i]), b = widen(dtype, y[i]);
                x[i] = narrow(dtype, APPLY(a, b));
            }
        }
    }
}
#define DIVIDE(type) for (size_t i = 0; i < count; i++) ((type *)at)[i] = (type)(((type *)at)[i] / (type)world)
static void divide(char *at, size_t count, int dtype, int world) {
    if (dtype == F32) DIVIDE(float);
    else if (dtype == F64) DIVIDE(double);
    else if (dtype == F16 || dtype == BF16)
        for (size_t i = 0; i < count; i++) ((uint16_t *)at)[i] = narrow(dtype, widen(dtype, ((uint16_t *)at)[i]) / (float)world);
}

// Groups of calls

static int send_all(struct comm *comm, const struct call *call) {
    const struct head *head = &call->head;
    size_t bytes = head->count * size_of(head->dtype);
    int code = SUCCESS;
    for (int peer = 0; peer < comm->world && code == SUCCESS; peer++) {
        int other = peer != comm->rank;
        switch (head->kind) {
            case ALL_REDUCE: case ALL_GATHER: if (other) code = post(comm, peer, head, call->from, bytes); break;
            case REDUCE: if (other && peer == head->root) code = post(comm, peer, head, call->from, bytes); break;
            case BROADCAST: if (other && comm->rank == head->root) code = post(comm, peer, head, call->from, bytes); break;
            case REDUCE_SCATTER: if (other) code = post(comm, peer, head, call->from + bytes * peer, bytes); break;
            case SEND: if (peer == call->peer) code = post(comm, peer, head, call->from, bytes); break;
            default: break;
        }
    }
    return code;
}
// The reduction of all ranks' elements, in the order of ranks, `own` being this one's.
static int gather_up(struct comm *comm, const struct head *head, const char *own, char *into) {
    size_t bytes = head->count * size_of(head->dtype);
    char *sum = malloc(bytes), *part = malloc(bytes);
    int code = SUCCESS;
    for (int peer = 0; peer < comm->world && code == SUCCESS; peer++) {
        char *to = peer ? part : sum;
        if (peer == comm->rank) memcpy(to, own, bytes); else code = take(comm, peer, head, to, bytes);
        if (peer && code == SUCCESS) reduce(sum, part, head->count, head->dtype, head->op);
    }
    if (head->op == AVG) divide(sum, head->count, head->dtype, comm->world);
    if (code == SUCCESS) memcpy(into, sum, bytes);
    free(sum);
    free(part);
    return code;
}
static int receive_all(struct comm *comm, const struct call *call) {
    const struct head *head = &call->head;
    size_t bytes = head->count * size_of(head->dtype);
    int code = SUCCESS;
    switch (head->kind) {
        case ALL_REDUCE: return gather_up(comm, head, call->from, call->into);
        case REDUCE: return comm->rank == head->root ? gather_up(comm, head, call->from, call->into) : SUCCESS;
        case REDUCE_SCATTER: return gather_up(comm, head, call->from + bytes * comm->rank, call->into);
        case BROADCAST:
            if (comm->rank != head->root) return take(comm, head->root, head, call->into, bytes);
            memmove(call->into, call->from, bytes);
            return SUCCESS;
        case ALL_GATHER:
            for (int peer = 0; peer < comm->world && code == SUCCESS; peer++) {
                if (peer == comm->rank) memmove(call->into + bytes * peer, call->from, bytes);
                else code = take(comm, peer, head, call->into + bytes * peer, bytes);
            }
            return code;
        case RECV: {
            struct head theirs = *head;
            theirs.kind = SEND;
            return take(comm, call->peer, &theirs, call->into, bytes);
        }
        default: return SUCCESS;
    }
}
static void done_with(struct comm *comm) {
    pthread_mutex_lock(&comm->mutex);
    comm->busy--;
    pthread_mutex_unlock(&comm->mutex);
}
static void work(void *argument) {
    struct group *group = argument;
    struct comm *comm = group->comm;
    unsigned looks = 0;
    int code = SUCCESS;
    while (group->fault && group->fault < 3 && !is_aborted(comm)) nap(&looks);
    int alive = !is_aborted(comm);
    for (int i = 0; alive && i < group->count && code == SUCCESS; i++) code = send_all(comm, &group->calls[i]);
    for (int i = 0; alive && i < group->count && code == SUCCESS; i++) code = receive_all(comm, &group->calls[i]);
    for (int peer = 0; alive && peer < comm->world && code == SUCCESS; peer++) wait_taken(comm, peer);
    if (code != SUCCESS && code != IN_PROGRESS) {
        set_state(comm, code);
        // A kernel that fails does not end by itself.
        while (!is_aborted(comm)) nap(&looks);
    }
    if (group->fault == 3) {
        usleep(100000);
        set_state(comm, REMOTE);
    }
    free(group->calls);
    free(group);
    done_with(comm);
}
static void *begin(void *argument) {
    struct group *group = argument;
    struct comm *comm = group->comm;
    // The caller has returned long ago.
    usleep(100);
    int failed = group->fault == 2;
    stand_in_enqueue(group->stream, work, group);
    set_state(comm, failed ? REMOTE : SUCCESS);
    return NULL;
}

static __thread int depth, refused;
static __thread struct group *groups;

int ncclGroupStart(void) {
    depth++;
    return SUCCESS;
}
int ncclGroupEnd(void) {
    if (depth <= 0) return wrong(INVALID_USAGE, "a group is ended that was not begun");
    if (--depth) return SUCCESS;
    struct group *group = groups;
    int code = refused ? INVALID_ARGUMENT : SUCCESS;
    groups = NULL;
    refused = 0;
    while (group) {
        struct group *next = group->next;
        struct comm *comm = group->comm;
        pthread_mutex_lock(&comm->mutex);
        unsigned number = ++comm->groups;
        pthread_mutex_unlock(&comm->mutex);
        group->fault = fault("hang", comm->rank, number) ? 1 : fault("error", comm->rank, number) ? 2 : fault("late", comm->rank, number) ? 3 : 0;
        if (fault("refuse", comm->rank, number)) code = wrong(INVALID_USAGE, "a refused call");
        if (code != SUCCESS) {
            free(group->calls);
            free(group);
        } else {
            pthread_t thread;
            pthread_mutex_lock(&comm->mutex);
            comm->busy++;
            if (comm->state == SUCCESS) comm->state = IN_PROGRESS;
            pthread_mutex_unlock(&comm->mutex);
            if (pthread_create(&thread, NULL, begin, group)) abort();
            pthread_detach(thread);
        }
        group = next;
    }
    return code == SUCCESS ? IN_PROGRESS : code;
}
static int add(struct comm *comm, void *stream, struct call call) {
    const char *text = NULL;
    int device = current_device(), code = SUCCESS, reads = 1, writes = 1;
    if (call.head.kind == SEND) writes = 0;
    if (call.head.kind == RECV) reads = 0;
    if (call.head.kind == REDUCE) writes = comm->rank == call.head.root;
    if (call.head.kind == BROADCAST) reads = comm->rank == call.head.root;
    if (device != comm->device) text = "the calling thread is at another device";
    else if (reads && !is_on_device(call.from)) text = "what is to be read is not on a device";
    else if (writes && !is_on_device(call.into)) text = "what is to be written is not on a device";
    else if (call.head.root < 0 || call.head.root >= comm->world || call.peer < 0 || call.peer >= comm->world) text = "there is no such rank";
    if (text) {
        refused = depth > 0;
        return wrong(INVALID_ARGUMENT, text);
    }
    call.from = on_host(call.from);
    call.into = on_host(call.into);
    ncclGroupStart();
    struct group **at = &groups;
    while (*at && ((*at)->comm != comm || (*at)->stream != stream)) at = &(*at)->next;
    if (!*at) {
        *at = calloc(1, sizeof **at);
        (*at)->comm = comm;
        (*at)->stream = stream;
    }
    (*at)->calls = realloc((*at)->calls, ((*at)->count + 1) * sizeof call);
    (*at)->calls[(*at)->count++] = call;
    code = ncclGroupEnd();
    return code;
}

int ncclAllReduce(const void *from, void *into, size_t count, int dtype, int op, struct comm *comm, void *stream) {
    return add(comm, stream, (struct call){{ALL_REDUCE, dtype, op, 0, count}, from, into, 0});
}
int ncclReduce(const void *from, void *into, size_t count, int dtype, int op, int root, struct comm *comm, void *stream) {
    return add(comm, stream, (struct call){{REDUCE, dtype, op, root, count}, from, into, 0});
}
int ncclBroadcast(const void *from, void *into, size_t count, int dtype, int root, struct comm *comm, void *stream) {
    return add(comm, stream, (struct call){{BROADCAST, dtype, 0, root, count}, from, into, 0});
}
int ncclAllGather(const void *from, void *into, size_t count, int dtype, struct comm *comm, void *stream) {
    return add(comm, stream, (struct call){{ALL_GATHER, dtype, 0, 0, count}, from, into, 0});
}
int ncclReduceScatter(const void *from, void *into, size_t count, int dtype, int op, struct comm *comm, void *stream) {
    return add(comm, stream, (struct call){{REDUCE_SCATTER, dtype, op, 0, count}, from, into, 0});
}
int ncclSend(const void *from, size_t count, int dtype, int peer, struct comm *comm, void *stream) {
    return add(comm, stream, (struct call){{SEND, dtype, 0, 0, count}, from, NULL, peer});
}
int ncclRecv(void *into, size_t count, int dtype, int peer, struct comm *comm, void *stream) {
    return add(comm, stream, (struct call){{RECV, dtype, 0, 0, count}, NULL, into, peer});
}

// Communicators

int ncclGetVersion(int *version) { *version = 22707; return SUCCESS; }
int ncclGetUniqueId(unique_id *id) {
    const char *root = getenv("TMPDIR");
    memset(id, 0, sizeof *id);
    if (snprintf(id->internal, 90, "%s/nccl-stand-in-XXXXXX", root ? root : "/tmp") >= 90) return wrong(SYSTEM, "TMPDIR is too long");
    return mkdtemp(id->internal) ? SUCCESS : wrong(SYSTEM, "no folder can be made");
}
static void mark(const struct comm *comm, const char *what) {
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s/%s-%d", comm->folder, what, comm->rank);
    int file = open(name, O_CREAT | O_WRONLY, 0600);
    if (file >= 0) close(file);
}
static int all_marked(const struct comm *comm, const char *what) {
    char name[PATH_MAX];
    for (int rank = 0; rank < comm->world; rank++) {
        snprintf(name, sizeof name, "%s/%s-%d", comm->folder, what, rank);
        if (access(name, F_OK)) return 0;
    }
    return 1;
}
static void come(struct comm *comm) {
    char name[PATH_MAX], here[PATH_MAX];
    snprintf(name, sizeof name, "%s/coming-%d", comm->folder, comm->rank);
    snprintf(here, sizeof here, "%s/here-%d", comm->folder, comm->rank);
    comm->presence = open(name, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (comm->presence < 0 || flock(comm->presence, LOCK_EX) || rename(name, here)) abort();
}
static int is_here(const struct comm *comm, int rank) {
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s/here-%d", comm->folder, rank);
    int file = open(name, O_RDONLY | O_CLOEXEC);
    int locked = file >= 0 && flock(file, LOCK_SH | LOCK_NB);
    if (file >= 0) close(file);
    return locked;
}
static void *meet(void *argument) {
    struct comm *comm = argument;
    unsigned looks = 0;
    if (!fault("meet", comm->rank, 0)) come(comm);
    while (!all_marked(comm, "here") && !is_aborted(comm)) nap(&looks);
    pthread_mutex_lock(&comm->mutex);
    comm->met = all_marked(comm, "here");
    pthread_mutex_unlock(&comm->mutex);
    set_state(comm, SUCCESS);
    done_with(comm);
    return NULL;
}
int ncclCommInitRankConfig(struct comm **out, int world, unique_id id, int rank, struct config *config) {
    if (config->magic != 0xcafebeef || config->blocking) return wrong(INVALID_ARGUMENT, "a configuration that is not known here");
    if (rank < 0 || rank >= world || current_device() < 0) return wrong(INVALID_ARGUMENT, "no such rank, or no device");
    struct comm *comm = calloc(1, sizeof *comm);
    snprintf(comm->folder, sizeof comm->folder, "%.99s", id.internal);
    comm->rank = rank;
    comm->world = world;
    comm->device = current_device();
    comm->presence = -1;
    comm->sent = calloc(world, sizeof *comm->sent);
    comm->received = calloc(world, sizeof *comm->received);
    comm->state = IN_PROGRESS;
    comm->busy = 1;
    pthread_mutex_init(&comm->mutex, NULL);
    *out = comm;
    pthread_t thread;
    if (pthread_create(&thread, NULL, meet, comm)) abort();
    pthread_detach(thread);
    return IN_PROGRESS;
}
int ncclCommGetAsyncError(struct comm *comm, int *state) {
    pthread_mutex_lock(&comm->mutex);
    *state = comm->state;
    if (comm->closed && comm->busy && comm->state == SUCCESS) *state = IN_PROGRESS;
    pthread_mutex_unlock(&comm->mutex);
    return SUCCESS;
}
int ncclCommFinalize(struct comm *comm) {
    pthread_mutex_lock(&comm->mutex);
    comm->closed = 1;
    pthread_mutex_unlock(&comm->mutex);
    return IN_PROGRESS;
}
static int leave(struct comm *comm) {
    unsigned looks = 0;
    for (;;) {
        pthread_mutex_lock(&comm->mutex);
        int busy = comm->busy;
        pthread_mutex_unlock(&comm->mutex);
        if (!busy) break;
        nap(&looks);
    }
    if (comm->presence >= 0) close(comm->presence);
    for (int peer = 0; comm->met && peer < comm->world; peer++)
        while (peer != comm->rank && is_here(comm, peer)) nap(&looks);
    mark(comm, "left");
    if (all_marked(comm, "left")) {
        DIR *folder = opendir(comm->folder);
        for (struct dirent *entry; folder && (entry = readdir(folder));)
            unlinkat(dirfd(folder), entry->d_name, 0);
        if (folder) closedir(folder);
        rmdir(comm->folder);
    }
    free(comm->sent);
    free(comm->received);
    free(comm);
    return SUCCESS;
}
int ncclCommDestroy(struct comm *comm) { return leave(comm); }
int ncclCommAbort(struct comm *comm) {
    pthread_mutex_lock(&comm->mutex);
    comm->aborted = 1;
    pthread_mutex_unlock(&comm->mutex);
    return leave(comm);
}
const char *ncclGetErrorString(int code) {
    static const char *texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
    return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}
const char *ncclGetLastError(struct comm *comm) { (void)comm; return last_error; }
