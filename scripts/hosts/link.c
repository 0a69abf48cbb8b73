/* A link between two network namespaces, for kernels without netem: packets of one side's tun device come out of the other's
 * some milliseconds later, at so many bits a second, but for those that are lost.
 *
 *   link NAMESPACE NAMESPACE DEVICE [COMMAND]...
 *
 * Commands may follow as lines of the standard input, each of which is answered by a line:
 *
 *   delay MS                      of each packet, each way
 *   rate MBIT                     a second, each way, with a queue of QUEUE_MS; 0 is no limit
 *   lose PER_MILLE [there|back]   of all packets, or of those from the first side, or to it; 1000 is silence
 *   bytes                         the answer is what the first side has sent, and the second one, lost or not
 *
 * It says "ready" once both devices are there, and ends with its standard input. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 1 << 14, LONGEST = 2048, QUEUE_MS = 100, LINE = 256 };
#define MS 1000000LL

struct packet {
    int64_t due;
    int length;
    char bytes[LONGEST];
};

/* One direction, and what is on its way in it, in order. */
struct way {
    int from, to;
    int per_mille;
    /* When the last packet so far has left the queue. */
    int64_t sent;
    uint64_t bytes;
    unsigned first, count;
    struct packet *packets;
};

static int64_t delay;
static double ns_per_byte;

static void give_up(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 * MS + now.tv_nsec;
}

/* A device in a namespace; this process stays where it is, and is none of that host's. */
static int device_in(const char *name, const char *device) {
    char path[256];
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), netns = open(path, O_RDONLY | O_CLOEXEC);
    if (own < 0 || netns < 0 || setns(netns, CLONE_NEWNET) < 0) give_up(path);
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    /* Without offloading: the kernel gives packets as a network card sends them. */
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    snprintf(request.ifr_name, IFNAMSIZ, "%s", device);
    if (tun < 0 || ioctl(tun, TUNSETIFF, &request) < 0) give_up("/dev/net/tun");
    if (setns(own, CLONE_NEWNET) < 0) give_up("the namespace of before");
    close(own);
    close(netns);
    return tun;
}

static void take(struct way *way) {
    static char nowhere[LONGEST];
    for (;;) {
        int64_t now = now_ns();
        int full = way->count == MOST || way->sent - now > QUEUE_MS * MS;
        int lost = full || random() % 1000 < way->per_mille;
        struct packet *last = &way->packets[(way->first + way->count) % MOST];
        ssize_t length = read(way->from, lost ? nowhere : last->bytes, LONGEST);
        if (length <= 0) return;
        way->bytes += (uint64_t)length;
        if (lost) continue;
        way->sent = (way->sent > now ? way->sent : now) + (int64_t)((double)length * ns_per_byte);
        last->length = (int)length;
        last->due = way->sent + delay;
        way->count++;
    }
}

/* Nanoseconds until the next packet is due; -1 where there is none. */
static int64_t give(struct way *way) {
    while (way->count > 0) {
        struct packet *next = &way->packets[way->first];
        int64_t left = next->due - now_ns();
        if (left > 0) return left;
        /* A device that is down takes nothing: the packet is lost. */
        if (write(way->to, next->bytes, (size_t)next->length) < 0) {}
        way->first = (way->first + 1) % MOST;
        way->count--;
    }
    return -1;
}

/* Does what a line says, and writes the answer; 0 if it says nothing that is known. */
static int obey(const char *line, struct way ways[2], char answer[LINE]) {
    char what[16] = "", way[16] = "";
    double number = 0;
    int words = sscanf(line, "%15s %lf %15s", what, &number, way);
    snprintf(answer, LINE, "done");
    if (words == 1 && !strcmp(what, "bytes")) {
        snprintf(answer, LINE, "%llu %llu", (unsigned long long)ways[0].bytes, (unsigned long long)ways[1].bytes);
    } else if (words < 2 || number < 0) {
        return 0;
    } else if (!strcmp(what, "delay")) {
        delay = (int64_t)(number * MS);
    } else if (!strcmp(what, "rate")) {
        ns_per_byte = number > 0 ? 8e3 / number : 0;
    } else if (!strcmp(what, "lose")) {
        if (strcmp(way, "back")) ways[0].per_mille = (int)number;
        if (strcmp(way, "there")) ways[1].per_mille = (int)number;
    } else {
        return 0;
    }
    return 1;
}

/* Reads a byte of the standard input, and answers a line that it ends; 0 at the end. */
static int listen_to_input(struct way ways[2]) {
    static char line[LINE];
    static size_t length;
    char answer[LINE], byte;
    if (read(0, &byte, 1) <= 0) return 0;
    if (byte != '\n') {
        if (length + 1 < sizeof line) line[length++] = byte;
        return 1;
    }
    line[length] = 0;
    length = 0;
    printf("%s\n", obey(line, ways, answer) ? answer : "what?");
    fflush(stdout);
    return 1;
}

int main(int argc, char **argv) {
    struct way ways[2] = {{0}, {0}};
    char answer[LINE];
    for (int at = 4; at < argc; at++) {
        if (!obey(argv[at], ways, answer)) argc = 0;
    }
    if (argc < 4) {
        fprintf(stderr, "link NAMESPACE NAMESPACE DEVICE [\"delay MS\" | \"rate MBIT\" | \"lose PER_MILLE [there|back]\"]...\n");
        return 2;
    }
    int a = device_in(argv[1], argv[3]), b = device_in(argv[2], argv[3]);
    for (int at = 0; at < 2; at++) {
        ways[at].from = at ? b : a;
        ways[at].to = at ? a : b;
        ways[at].packets = malloc(sizeof(struct packet) * MOST);
        if (!ways[at].packets) give_up("memory");
    }
    srandom(42);
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        struct pollfd fds[3] = {{a, POLLIN, 0}, {b, POLLIN, 0}, {0, POLLIN, 0}};
        int64_t there = give(&ways[0]), back = give(&ways[1]);
        int64_t wait = there < 0 ? back : back < 0 || there < back ? there : back;
        struct timespec left = {.tv_sec = wait / (1000 * MS), .tv_nsec = wait % (1000 * MS)};
        if (ppoll(fds, 3, wait < 0 ? NULL : &left, NULL) < 0) continue;
        if (fds[2].revents && !listen_to_input(ways)) return 0;
        take(&ways[0]);
        take(&ways[1]);
    }
}
